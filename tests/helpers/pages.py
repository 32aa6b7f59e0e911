"""Parse HTML pages to test their content."""

from decimal import Decimal
from html.parser import HTMLParser

VOID = {"meta", "input", "img", "br", "link"}


class Element:
    """An element of a page: its name, attributes and content."""

    def __init__(self, name, attributes, parent):
        self.name, self.attributes, self.parent, self.children = name, attributes, parent, []

    def all(self, name, **attributes):
        """Return the inner elements with this name and these attributes."""
        for child in self.children:
            if isinstance(child, Element):
                if child.name == name and attributes.items() <= child.attributes.items():
                    yield child
                yield from child.all(name, **attributes)

    @property
    def text(self):
        return "".join(child if isinstance(child, str) else child.text for child in self.children)


class Parser(HTMLParser):
    """Parse a page, and check that every element is closed."""

    def __init__(self, html):
        super().__init__()
        self.root = self.open = Element("", {}, None)
        self.every = []
        self.feed(html)
        self.close()
        assert self.open is self.root

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs), self.open)
        assert len(element.attributes) == len(attrs)
        self.every.append(element)
        self.open.children.append(element)
        if tag not in VOID:
            self.open = element

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.name == tag
        self.open = self.open.parent

    def handle_data(self, data):
        self.open.children.append(data)


def numbers_of(table):
    """Return the last number in each row of a table."""
    rows = [list(row.all("td", **{"class": "number"})) for row in table.all("tr")]
    return [Decimal(cells[-1].text) for cells in rows if cells]
