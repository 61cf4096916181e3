#!/bin/sh
# Copies bash, curl, git and jq into a folder, with the libraries and files that they need and
# nothing else; all other commands are busybox. Run in the Debian that they come from.
#
#   collect.sh FOLDER
set -eu
to=$1

mkdir -p "$to/usr/bin" "$to/usr/sbin" "$to/usr/lib" "$to/usr/lib64" "$to/etc" "$to/var/tmp" \
    "$to/run" "$to/dev" "$to/proc" "$to/sys" "$to/mnt"
mkdir -p -m 700 "$to/root"
mkdir -p -m 1777 "$to/tmp" "$to/workspace"
chmod 1777 "$to/var/tmp"
for folder in bin sbin lib lib64; do ln -s "usr/$folder" "$to/$folder"; done

# One file, to where it really is: /bin and /lib are links. What was copied is listed.
copied=$(mktemp)
copy() {
    real=$(readlink -f "$(dirname "$1")")/$(basename "$1")
    [ -e "$to$real" ] || [ -L "$to$real" ] || {
        mkdir -p "$to$(dirname "$real")"
        cp "$2" "$real" "$to$real"
        echo "$1" >>"$copied"
        echo "$real" >>"$copied"
    }
}

core=/usr/lib/git-core
helpers="$core/git-remote-http $core/git-sh-i18n--envsubst"
for program in /bin/bash /usr/bin/curl /usr/bin/git /usr/bin/jq /bin/busybox $helpers; do
    copy "$program" -p
    # Static ones need no libraries.
    { ldd "$program" 2>/dev/null || true; } | grep -o '/[^ ]*' | while read -r library; do
        copy "$library" -L
    done
done
# Links to those, and git's own shell scripts; no other programs, and no Perl.
for path in "$core"/git-* /usr/bin/git-*; do
    if [ -L "$path" ]; then
        copy "$path" -Pp
    elif [ -f "$path" ] && ! head -n 1 "$path" | grep -qaE 'ELF|perl|python'; then
        copy "$path" -p
    fi
done
for path in /usr/share/git-core/templates/*; do
    mkdir -p "$to/usr/share/git-core/templates"
    cp -a "$path" "$to/usr/share/git-core/templates/"
done
for path in /etc/passwd /etc/group /etc/nsswitch.conf /etc/debian_version /usr/lib/os-release \
    /etc/ssl/certs/ca-certificates.crt /lib/terminfo/d/dumb /lib/terminfo/l/linux \
    /lib/terminfo/s/screen /lib/terminfo/s/screen-256color /lib/terminfo/t/tmux \
    /lib/terminfo/v/vt100 /lib/terminfo/x/xterm /lib/terminfo/x/xterm-256color; do
    if [ -e "$path" ]; then copy "$path" -L; fi
done
ln -s ../usr/lib/os-release "$to/etc/os-release"
for name in $(/bin/busybox --list); do
    [ -e "$to/usr/bin/$name" ] || [ -L "$to/usr/bin/$name" ] || ln -s busybox "$to/usr/bin/$name"
done

# For scanners of images and for lawyers: which packages these files are from.
mkdir -p "$to/var/lib/dpkg/status.d"
xargs dpkg-query --search <"$copied" 2>/dev/null | sed 's/: .*//' | tr ',' '\n' | tr -d ' ' |
    sort -u | while read -r package; do
        name=${package%%:*}
        dpkg-query --status "$package" >"$to/var/lib/dpkg/status.d/$name"
        mkdir -p "$to/usr/share/doc/$name"
        cp -L "/usr/share/doc/$name/copyright" "$to/usr/share/doc/$name/" || true
    done
cp -a /usr/share/common-licenses "$to/usr/share/"
rm -f "$copied"
