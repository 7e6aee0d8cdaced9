//! Prometheus scraping.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Samples of one scrape, by series.
#[derive(Debug, Clone)]
pub struct Samples(BTreeMap<String, f64>);

impl Samples {
    /// Returns the sum of a metric over all label sets.
    ///
    /// # Errors
    /// The scrape has no such metric.
    pub fn total(&self, name: &str) -> Result<f64> {
        let of_name =
            |series: &str| series == name || series.strip_prefix(name).is_some_and(|l| l.starts_with('{'));
        let values: Vec<f64> = self.0.iter().filter(|(series, _)| of_name(series)).map(|(_, v)| *v).collect();
        ensure!(!values.is_empty(), "no metric {name}");
        Ok(values.iter().sum())
    }

    /// Returns every series, as `name{labels}`, with its value.
    pub fn series(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(series, value)| (series.as_str(), *value))
    }
}

/// Scrapes `/metrics` of a process.
///
/// # Errors
/// The connection fails, or the response is no valid scrape.
pub async fn scrape(address: SocketAddr) -> Result<Samples> {
    let mut stream = TcpStream::connect(address).await.context("metrics endpoint")?;
    let request = format!("GET /metrics HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut response = String::new();
    stream.read_to_string(&mut response).await?;
    let Some((head, body)) = response.split_once("\r\n\r\n") else { bail!("no HTTP response") };
    ensure!(head.starts_with("HTTP/1.1 200"), "metrics endpoint said {head}");
    let mut samples = BTreeMap::new();
    for line in body.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (series, value) = line.rsplit_once(' ').with_context(|| format!("not a sample: {line}"))?;
        samples.insert(series.to_owned(), value.parse().with_context(|| format!("not a sample: {line}"))?);
    }
    Ok(Samples(samples))
}
