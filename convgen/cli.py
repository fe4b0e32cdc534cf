"""`python -m convgen.cli`, as launchers that want a module are told: a door to commands/."""

from convgen.commands.main import main

if __name__ == "__main__":
    main()
