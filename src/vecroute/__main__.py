"""``python -m vecroute`` and the command ``vecroute``."""

import sys


def main() -> None:
    try:
        from vecroute.cli import main as run
    except ModuleNotFoundError as error:
        extras = "cli,hf,data,sklearn"
        print(
            f"vecroute: the command line needs {error.name}: pip install 'vecroute[{extras}]'",
            file=sys.stderr,
        )
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
