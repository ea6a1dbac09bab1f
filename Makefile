.PHONY: setup
