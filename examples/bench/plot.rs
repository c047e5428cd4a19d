//! The plots, as SVG.

use std::path::Path;

use anyhow::anyhow;
use plotters::prelude::*;

use crate::load::Ids;
use crate::measure::{Growth, Series, Sizes, WORKERS};
use crate::world::Queue;

/// A line with its name.
struct Curve {
    name: String,
    points: Vec<(f64, f64)>,
    dashed: bool,
}

/// Throughput over the size of a batch, on a logarithmic scale.
pub fn sizes(sizes: &Sizes, file: &Path) -> anyhow::Result<()> {
    let mut curves = Vec::new();
    for queue in [Queue::Quorum, Queue::Classic] {
        for workers in WORKERS {
            let mine = sizes.service.iter().filter(|size| size.queue == queue && size.workers == workers);
            let points = mine.filter_map(|size| Some((f64::from(size.batch_size), size.series.rate().median()?)));
            let name = format!("{} queue, {workers} worker{}", queue.kind(), if workers == 1 { "" } else { "s" });
            curves.push(Curve { name, points: points.collect(), dashed: false });
        }
    }
    for (clients, events, rate) in
        sizes.pgbench.iter().filter(|(clients, events, _)| *clients == 8 || *events > 1 && *clients == 2)
    {
        let name =
            format!("pgbench, {clients} clients, {events} event{} a transaction", if *events == 1 { "" } else { "s" });
        curves.push(Curve { name, points: vec![(1.0, *rate), (1000.0, *rate)], dashed: true });
    }
    draw("Messages a second by the size of a batch", "events of a transaction, at most", curves, 1.0..1000.0, file)
}

/// Throughput over the rows of the guard's table.
pub fn growth(growth: &Growth, file: &Path) -> anyhow::Result<()> {
    let curve = |ids: Ids| {
        let rate = |series: &Series| series.rate().median().unwrap_or_default();
        let filled = growth.filled.iter().filter(|(of, ..)| *of == ids);
        // A logarithmic scale has no 0.
        let empty = std::iter::once((0.1, rate(&growth.empty)));
        let millions = filled
            .map(|(_, rows, series)| (f64::from(u32::try_from(rows / 1_000_000).unwrap_or_default()), rate(series)));
        Curve { name: format!("{ids:?} ids"), points: empty.chain(millions).collect(), dashed: false }
    };
    let curves = vec![curve(Ids::V7), curve(Ids::V4)];
    draw("Messages a second by rows in processed_event", "million rows (left: an empty table)", curves, 0.1..50.0, file)
}

fn draw(title: &str, below: &str, curves: Vec<Curve>, range: std::ops::Range<f64>, file: &Path) -> anyhow::Result<()> {
    let most = curves.iter().flat_map(|curve| &curve.points).map(|(_, rate)| *rate).fold(0.0, f64::max);
    let root = SVGBackend::new(file, (860, 520)).into_drawing_area();
    let failed = |error: DrawingAreaErrorKind<_>| anyhow!("cannot draw {}: {error}", file.display());
    root.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(72)
        .build_cartesian_2d(range.log_scale(), 0.0..most * 1.35)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .x_desc(below)
        .y_desc("messages a second")
        .y_label_formatter(&|rate| crate::sample::readable(*rate))
        .light_line_style(WHITE)
        .draw()
        .map_err(failed)?;
    for (number, curve) in curves.into_iter().enumerate() {
        let color = Palette99::pick(number).to_rgba();
        let style = ShapeStyle { color, filled: false, stroke_width: 2 };
        let series = match curve.dashed {
            true => chart.draw_series(DashedLineSeries::new(curve.points, 6, 4, style)).map_err(failed)?,
            false => chart.draw_series(LineSeries::new(curve.points, style).point_size(3)).map_err(failed)?,
        };
        series.label(curve.name).legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .draw()
        .map_err(failed)?;
    root.present().map_err(failed)
}
