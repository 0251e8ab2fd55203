"""Private parts of other libraries that headfold relies on: one module per library, with tests of its version."""
