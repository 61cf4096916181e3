# The sources of packaging 24.2.
cp -r /opt/kitchen/sdist/packaging/. .
