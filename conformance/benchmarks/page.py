"""The timings as a section of the HTML report."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment

from mha.conformance.benchmarks.compare import HEADINGS, Timing
from mha.conformance.reports.html import Section
from mha.conformance.reports.text import visible, visible_name

TEMPLATE = """\
<p>All implementations were timed in interleaved rounds. Ratio: to the first one that was timed, \
in the same round; the
median and its 95% interval. Share: of the rate at which the machine multiplies matrices, \
measured in the same rounds;
more than 100% is an error of measurement, marked with !. GB/s: the least memory traffic \
of the workload, divided by the
time. MiB: the peak of what torch allocated.</p>
{% for title, rows in tables.items() %}<table class="plain timings">
<caption>{{ title }}</caption>
<thead><tr><th scope="col">implementation</th>
{%- for heading in headings %}<th scope="col">{{ heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for timing in rows %}<tr><th scope="row">{{ timing.implementation | visible_name }}
{%- if timing.is_impossible %} !{% endif %}</th>
{%- if timing.skip_reason %}<td colspan="{{ headings | length }}">not timed: \
{{ timing.skip_reason | visible }}</td>
{%- else %}{% for cell in timing.cells %}<td>{{ cell }}</td>{% endfor %}{% endif %}</tr>
{% endfor %}</tbody>
</table>
{% endfor %}{% if picture %}<figure>{{ picture | safe }}</figure>
{% endif %}"""


def timing_section(timings: Sequence[Timing], picture: str = "") -> Section:
    """Return a table for each workload; picture: SVG to be shown below them."""
    tables: dict[str, list[Timing]] = {}
    for timing in timings:
        tables.setdefault(timing.workload.title, []).append(timing)
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters |= {"visible": visible, "visible_name": visible_name}
    body = environment.from_string(TEMPLATE).render(
        tables=tables, headings=HEADINGS, picture=picture
    )
    return Section("Timings", "timings", body)
