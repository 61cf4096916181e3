# The crate semver 1.0.24, with its tests.
cp -r /opt/kitchen/crates/semver/. .
rm -f .cargo-checksum.json Cargo.toml.orig
sed -i "/dependencies.serde/,\$d" Cargo.toml; rm -f Cargo.lock
mkdir -p .cargo
printf '[source.crates-io]\nreplace-with = "vendored"\n[source.vendored]\ndirectory = "/opt/kitchen/crates/fetch/vendor"\n' > .cargo/config.toml
chmod -R u+w .
