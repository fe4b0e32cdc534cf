"""Pure mathematics: grids, blocks, windows, layouts, roles, redistributions. No torch, no I/O."""
