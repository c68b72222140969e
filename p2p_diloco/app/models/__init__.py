"""Language models: build, load, export and sample them."""
