"""The monitor: what a scaled service and its autoscaler are doing, on a terminal or as an SVG picture.

Source: scaling.md 6.7. One board (`board`), shown the same way whatever it was made from: the evidence of a run that is
over or still grows (`run_source`), or a control API that answers over HTTP (`url_source`). What is not known is shown
as *unknown*, never as 0.
"""
