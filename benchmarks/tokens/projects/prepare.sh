#!/usr/bin/env bash
# Fetch what the samples are made of into $1: tools, and the sources of a few real projects.
# Needs the network; everything that runs afterwards in a box does not.
set -euo pipefail
here=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
cd "$1"
uv=${UV:-uv}

if [ ! -e tools/bin/pytest ]; then
    "$uv" venv -q --seed --python /usr/bin/python3 tools
    "$uv" pip install -q --python tools/bin/python \
        pytest==8.3.4 pytest-xdist==3.6.1 ruff==0.8.4 mypy==1.14.0 flake8==7.1.1 pylint==3.3.3
fi
if [ ! -d sdist/click ]; then
    mkdir -p sdist
    tools/bin/pip download -q --no-deps --no-binary :all: -d sdist click==8.1.8 packaging==24.2
    for file in sdist/*.tar.gz; do tar -xzf "$file" -C sdist && rm "$file"; done
    mv sdist/click-* sdist/click && mv sdist/packaging-* sdist/packaging
fi
if [ ! -d debs/usr ]; then
    mkdir -p debs && (cd debs && apt-get download -q ripgrep tree && for f in *.deb; do dpkg -x "$f" .; done)
fi
if [ ! -d go/mod ]; then
    export GOMODCACHE=$PWD/go/mod GOFLAGS=-modcacherw
    mkdir -p go/cast && cd go/cast
    go mod init example.com/fetch
    go get github.com/spf13/cast@v1.7.1 github.com/spf13/pflag@v1.0.5 github.com/frankban/quicktest@v1.14.6
    cd ../..
    for name in cast@v1.7.1 pflag@v1.0.5; do cp -r "go/mod/github.com/spf13/$name" "go/${name%@*}-src"; done
    (cd go/cast-src && go mod tidy)
fi
if [ ! -d crates/semver ]; then
    mkdir -p crates/fetch/src && (cd crates/fetch && echo 'fn main() {}' > src/main.rs &&
        printf '[package]\nname = "fetch"\nversion = "0.1.0"\n[dependencies]\nsemver = "=1.0.24"\nlibz-sys = "=1.1.20"\nserde = { version = "=1.0.217", features = ["derive"] }\nregex = "=1.11.1"\nclap = "=4.5.23"\n' > Cargo.toml &&
        cargo vendor -q vendor > config.toml)
    cp -r crates/fetch/vendor/semver crates/semver
    cp -r crates/fetch/vendor/libz-sys/src/zlib crates/zlib
fi
if [ ! -d node/node_modules ]; then
    mkdir -p node && cd node
    npm init -y > /dev/null
    npm install --silent jest@29.7.0 vitest@2.1.8 eslint@9.17.0 @eslint/js@9.17.0 typescript@5.7.2 express@4.21.2 pnpm@9.15.1 yarn@1.22.22
    cd ..
fi
if [ ! -d repo.git ]; then
    git clone -q --bare "$here" repo.git
    chmod -R a+rX repo.git
fi
