"""Join a run from other projects' training loops. Each module needs the package that it is named after."""
