"""What all generated modules do alike, as plain Python: a file an idea, which its first line says.

convgen/emit/paste.py pastes of it what a single module needs, and writes all of it beside modules that are compiled
together; convgen/emit/runtime.py has the files in their order, those of all modules and those of networks alone. Files
that `import` one another run down that order, and types may name what comes later.

What depends on the layer comes in a Layer, on the network in a Net. Of convgen, files know what is pasted with them.
"""
