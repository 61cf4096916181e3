#!/usr/bin/env bash
# Fetch what the unseen samples are made of into $1: tools, and other projects than those of `corpus`.
set -euo pipefail
mkdir -p "$1/unseen" && cd "$1/unseen"
uv=${UV:-uv}

if [ ! -e tools/bin/pytest ]; then
    "$uv" venv -q --seed --python "${PYTHON3:-/usr/bin/python3}" tools
    "$uv" pip install -q --python tools/bin/python pytest==8.4.2 pytest-cov==6.2.1 freezegun==1.5.1 \
        ruff==0.12.4 mypy==1.17.0 flake8==7.3.0 pylint==3.3.7 black==25.1.0 coverage==7.9.2
fi
if [ ! -d python/humanize ]; then
    mkdir -p python
    tools/bin/pip download -q --no-deps --no-binary :all: -d python humanize==4.11.0 itsdangerous==2.2.0 \
        cachetools==5.5.0 pluggy==1.5.0 tomli==2.2.1 more-itertools==10.5.0 tabulate==0.9.0
    for file in python/*.tar.gz; do tar -xzf "$file" -C python && rm "$file"; done
    for folder in python/*-*/; do mv "$folder" "${folder%-*}"; done
fi
if [ ! -d debs/usr ]; then
    mkdir -p debs && (cd debs && apt-get download -q ripgrep tree && for f in *.deb; do dpkg -x "$f" .; done)
fi
if [ ! -d crates ]; then
    mkdir -p fetch/src && (cd fetch && echo 'fn main() {}' > src/main.rs &&
        printf '[package]\nname = "fetch"\nversion = "0.1.0"\n[dependencies]\nheck = "=0.5.0"\ntextwrap = "=0.16.1"\nstrsim = "=0.11.1"\nhumantime = "=2.1.0"\nfastrand = "=2.3.0"\nlz4-sys = "=1.11.1"\nlibmimalloc-sys = "=0.1.39"\nserde_json = "=1.0.140"\n' > Cargo.toml &&
        cargo vendor -q vendor > config.toml)
    mkdir crates && cp -r fetch/vendor/{heck,textwrap,strsim,humantime,fastrand} crates/
    mkdir c && cp -r fetch/vendor/lz4-sys/liblz4 c/lz4 && cp -r fetch/vendor/libmimalloc-sys/c_src/mimalloc c/mimalloc
fi
if [ ! -d go ]; then
    export GOMODCACHE=$PWD/gomod GOFLAGS=-modcacherw
    mkdir -p go/fetch && (cd go/fetch && go mod init example.com/fetch 2> /dev/null &&
        go get -d github.com/google/uuid@v1.6.0 github.com/BurntSushi/toml@v1.4.0 github.com/mattn/go-runewidth@v0.0.16 2> /dev/null)
    cp -r gomod/github.com/google/uuid@v1.6.0 go/uuid
    cp -r gomod/github.com/\!burnt\!sushi/toml@v1.4.0 go/toml
    cp -r gomod/github.com/mattn/go-runewidth@v0.0.16 go/runewidth
    chmod -R u+w go
fi
if [ ! -d node/node_modules ]; then
    mkdir -p node && cd node && npm init -y > /dev/null
    npm install --silent eslint@9.31.0 @eslint/js@9.31.0 typescript@5.8.3 mocha@11.7.1 tape@5.9.0 qs@6.14.0 \
        object-inspect@1.13.4 commander@12.1.0 minimist@1.2.8 dayjs@1.11.13 prettier@3.6.2 jest@30.0.4
    cd ..
fi
for name in pallets/markupsafe gorilla/mux; do
    [ -d "git/${name#*/}" ] || git clone -q "${CLONES:-https://github.com}/$name" "git/${name#*/}"
done
chmod -R a+rX .
