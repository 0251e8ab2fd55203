"""Write a comparison as tables, plots and pages."""
