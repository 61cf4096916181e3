# A package of tests with every way to go wrong.
mkdir -p tests src/shop
touch src/shop/__init__.py
cat > src/shop/prices.py <<'P'
import warnings

RATES = {"de": 0.19, "fr": 0.2}


def with_tax(net, country):
    if country not in RATES:
        raise LookupError(f"no tax rate for {country!r}")
    return round(net * (1 + RATES[country]), 2)


def old_price(net):
    warnings.warn("old_price is deprecated, use with_tax", DeprecationWarning, stacklevel=2)
    return net
P
cat > conftest.py <<'P'
import pytest


@pytest.fixture
def till():
    yield {"cash": 100}


@pytest.fixture
def broken_till():
    raise RuntimeError("the till is locked")
P
cat > tests/test_prices.py <<'P'
import pytest
from shop.prices import old_price, with_tax


@pytest.mark.parametrize("net", range(40))
def test_a_price_grows_by_its_tax(net):
    assert with_tax(net, "de") == round(net * 1.19, 2)


def test_france_has_twenty_percent():
    print("asking for france")
    receipt = {"net": 100, "country": "fr", "gross": with_tax(100, "fr")}
    assert receipt == {"net": 100, "country": "fr", "gross": 121.0}


def test_an_unknown_country_is_refused():
    with_tax(10, "atlantis")


def test_old_prices_still_work():
    assert old_price(3) == 3


@pytest.mark.skip(reason="needs a bank")
def test_the_bank():
    raise AssertionError


@pytest.mark.xfail(reason="rounding, see notes")
def test_a_known_flaw():
    assert with_tax(0.005, "de") == 0.01
P
cat > tests/test_till.py <<'P'
def test_cash(till):
    assert till["cash"] == 100


def test_locked(broken_till):
    pass


def test_counts_all_coins(till):
    coins = [n % 7 for n in range(60)]
    assert coins == [n % 7 for n in range(59)] + [9]
P
printf '[pytest]\npythonpath = src\ntestpaths = tests\n' > pytest.ini
