"""Documents in other formats than text, made by hand: PDF, DOCX, ODT, EPUB."""

import io
import zipfile

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
OFFICE = "urn:oasis:names:tc:opendocument:xmlns:"
CONTAINER = (
    '<?xml version="1.0"?><container xmlns="urn:oasis:names:tc:opendocument:xmlns:container">'
    '<rootfiles><rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
)


def pdf(*pages, trailer=""):
    """A PDF of ASCII bytes alone, one line of text a page; "" is a page without text."""
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for n, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else "0 0 9 9 re f"
        objects += [
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources "
            f"<< /Font << /F1 3 0 R >> >> /Contents {5 + 2 * n} 0 R >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        ]
    data, places = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n"
    rows = "".join(f"{place:010d} 00000 n \n" for place in places)
    size = len(objects) + 1
    return (
        f"{data}xref\n0 {size}\n0000000000 65535 f \n{rows}trailer\n"
        f"<< /Size {size} /Root 1 0 R {trailer} >>\nstartxref\n{len(data)}\n%%EOF\n"
    ).encode()


def archive(files):
    """A ZIP archive of {name: text or bytes}."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in files.items():
            zipped.writestr(name, content)
    return made.getvalue()


def docx(body, **more):
    """A Word document of this XML body; more: other parts in word/, by name without .xml."""
    head = f'<?xml version="1.0"?><w:document xmlns:w="{W}"><w:body>'
    parts = {f"word/{name}.xml": content for name, content in more.items()}
    whole = {"word/document.xml": f"{head}{body}</w:body></w:document>"}
    return archive({"[Content_Types].xml": "<Types/>", **whole, **parts})


def paragraph(*runs):
    """A paragraph of DOCX."""
    return "<w:p>" + "".join(f"<w:r><w:t>{run}</w:t></w:r>" for run in runs) + "</w:p>"


def odt(body):
    """An OpenDocument text of this XML body."""
    head = (
        f'<office:document-content xmlns:office="{OFFICE}office:1.0" '
        f'xmlns:text="{OFFICE}text:1.0"><office:body><office:text>'
    )
    end = "</office:text></office:body></office:document-content>"
    return archive(
        {"mimetype": "application/vnd.oasis.opendocument.text", "content.xml": head + body + end}
    )


def epub(*chapters, **more):
    """A book of these XHTML bodies, the spine in their order and the files in another."""
    named = [f"c{9 - n}.xhtml" for n in range(len(chapters))]
    manifest = "".join(
        f'<item id="i{n}" href="{name}" media-type="application/xhtml+xml"/>'
        for n, name in sorted(enumerate(named), key=lambda pair: pair[1])
    )
    spine = "".join(f'<itemref idref="i{n}"/>' for n in range(len(named)))
    book = (
        '<package xmlns="http://www.idpf.org/2007/opf">'
        f"<manifest>{manifest}</manifest><spine>{spine}</spine></package>"
    )
    files = {
        f"OEBPS/{name}": f"<html><head><title>no</title></head><body>{body}</body></html>"
        for name, body in zip(named, chapters)
    }
    head = {"mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER}
    return archive({**head, "OEBPS/book.opf": book, **files, **more})
