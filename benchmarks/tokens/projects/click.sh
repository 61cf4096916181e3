# The sources of click 8.1.8, with its tests.
cp -r /opt/kitchen/sdist/click/. .
rm tests/test_imports.py  # it needs an installed click
rm -f requirements/*.txt
printf '[pytest]\npythonpath = src\ntestpaths = tests\n' > pytest.ini
