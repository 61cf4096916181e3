# The sources of spf13/pflag 1.0.5.
cp -r /opt/kitchen/go/pflag-src/. .
chmod -R u+w .
