"""`python -m glm53serve`."""

from glm53serve.cli import main

raise SystemExit(main())
