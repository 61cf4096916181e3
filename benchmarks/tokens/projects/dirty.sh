# A working tree in the middle of a change.
. "$(dirname "${BASH_SOURCE[0]}")/repo.sh"
for file in $(git ls-files 'src/hutch/*.py' | head -18); do echo '# later' >> "$file"; done
git rm -q --cached docs/index.md 2> /dev/null || git rm -q --cached README.md
git mv CHANGELOG.md HISTORY.md
git add $(git ls-files 'src/hutch/*.py' | head -5)
for n in $(seq 1 30); do mkdir -p notes/day$n; echo "day $n" > notes/day$n/note.md; echo x > scratch$n.tmp; done
