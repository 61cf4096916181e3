# What one finds in a folder: sources, packages, notes.
cp -r /opt/kitchen/sdist/click/. .
mkdir -p vendor && cp -r /opt/kitchen/tools/lib/python3.11/site-packages/_pytest vendor/
find . -name __pycache__ -prune -exec rm -r {} +
find . -exec touch -h -d 2025-03-04T10:00:00Z {} +
