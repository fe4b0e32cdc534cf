"""`python -m convgen.cli`, for launchers that are told a module; it leads to commands/."""

from convgen.commands.main import main

if __name__ == "__main__":
    main()
