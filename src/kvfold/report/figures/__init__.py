"""Figures of a report: colours, plotly fronts for the page, the same as pictures."""
