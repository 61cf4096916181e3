# The sources of spf13/cast 1.7.1, a Go module with many tests.
cp -r /opt/kitchen/go/cast-src/. .
chmod -R u+w .
