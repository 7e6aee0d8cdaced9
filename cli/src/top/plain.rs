//! One snapshot as plain text, for `inflight top --once`.

use super::findings;
use super::header;
use super::model::Model;
use super::tables::{Column, REQUESTS, Sorting, TENANTS, arrange, cells, titles};
use super::worker_table::WORKERS;

/// Returns the whole state as text, in lines of at most `columns`.
pub fn snapshot(model: &Model, columns: usize) -> String {
    let mut text = String::new();
    for line in header::lines(model.state(), columns) {
        text.push_str(&line);
        text.push('\n');
    }
    let diagnosis = model.state().diagnosis.as_ref().filter(|diagnosis| !diagnosis.findings.is_empty());
    if diagnosis.is_some() {
        text.push('\n');
    }
    for (line, _) in diagnosis.into_iter().flat_map(|some| findings::text(Some(some), columns)).flatten() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    table(&mut text, model, &WORKERS, &model.workers(), model.worker_order, columns);
    table(&mut text, model, &TENANTS, &model.tenants(), model.tenant_order, columns);
    let requests = model.requests();
    table(&mut text, model, &REQUESTS, &requests, model.request_order, columns);
    let open = model.state().cluster.open_requests as usize;
    if open > requests.len() {
        text.push_str(&format!("… {} more requests are open\n", open - requests.len()));
    }
    text
}

fn table<R>(
    text: &mut String,
    model: &Model,
    columns: &[Column<R>],
    rows: &[&R],
    sorting: Sorting,
    width: usize,
) {
    let arranged = arrange(columns, width);
    let mut line = |cells: Vec<String>| {
        text.push_str(cells.join(" ").trim_end());
        text.push('\n');
    };
    line(Vec::new());
    line(titles(&arranged, columns, sorting));
    for row in rows {
        line(cells(&arranged, row, model.state()).into_iter().map(|(text, _)| text).collect());
    }
}
