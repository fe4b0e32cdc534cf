"""`python -m convgen`."""

from convgen.commands.main import main

main()
