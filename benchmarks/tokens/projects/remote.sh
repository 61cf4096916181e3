# A repository with a place to push to, where someone else was faster.
git init -q --bare -b main /tmp/origin.git
git clone -q /tmp/origin.git . 2> /dev/null
for n in $(seq 1 25); do printf 'line 1 of %s\nline 2\nline 3\n' $n > file$n.txt; done
git add . && git commit -q -m 'Begin' && git push -q origin HEAD:main && git branch -q -u origin/main
