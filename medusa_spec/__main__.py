"""`python -m medusa_spec` is `medusa-spec`: for launchers, which start modules."""

from medusa_spec.cli import main

if __name__ == "__main__":
    main()
