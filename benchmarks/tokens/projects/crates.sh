# A program with thirty crates under it.
cp -r /opt/kitchen/crates/fetch/src /opt/kitchen/crates/fetch/Cargo.toml /opt/kitchen/crates/fetch/Cargo.lock .
mkdir -p .cargo
printf '[source.crates-io]\nreplace-with = "vendored"\n[source.vendored]\ndirectory = "/opt/kitchen/crates/fetch/vendor"\n' > .cargo/config.toml
chmod -R u+w .
