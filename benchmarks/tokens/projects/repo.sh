# This very repository, at a commit that stays.
git clone -q --no-local /opt/kitchen/repo.git .
git checkout -q -B main b13d921
