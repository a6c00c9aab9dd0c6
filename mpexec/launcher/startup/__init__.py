"""A folder at the head of a rank's PYTHONPATH, where Python finds `sitecustomize` before it runs the script."""
