//! Metrics of a real cluster: documented and bounded labels, queueing time over both processes, limits, and the names of vLLM.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use inflight_harness::{LocalCluster, Samples, eventually, scrape};
use inflight_proto::v1::GenerateRequest;

use crate::program;
use crate::requests::{generate, model, sampled};

/// Returns the labels of the series with this name, and their values.
fn series(samples: &Samples, name: &str) -> BTreeMap<String, f64> {
    let of_name = samples.series().filter_map(|(series, value)| {
        let labels = series.strip_prefix(name)?;
        (labels.is_empty() || labels.starts_with('{')).then(|| (labels.to_owned(), value))
    });
    of_name.collect()
}

/// Generates 100 tokens for each of eight concurrent requests.
async fn generate_eight(cluster: &LocalCluster) -> Result<()> {
    let client = cluster.client().await?;
    let calls = (0..8).map(|seed| {
        let mut client = client.clone();
        async move { generate(&mut client, sampled("a", 100, seed)).await }
    });
    try_join_all(calls).await.map(drop)
}

/// Checks the label names of every series in a scrape against those documented for its metric. Returns the number of series checked.
fn check_labels<'a>(samples: &Samples, documented: &BTreeMap<&'a str, &'a [&'a str]>) -> Result<usize> {
    let mut checked = 0;
    for (series, _) in samples.series() {
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let histogram = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
        let Some(documented) = documented.get(name).or_else(|| documented.get(histogram?)) else { continue };
        // A label's value may hold anything but an unescaped quote.
        let names = labels.split("=\"").map(|part| part.rsplit(['"', ',']).next().unwrap_or_default());
        let exported: BTreeSet<&str> = names.filter(|name| !["", "}", "le"].contains(name)).collect();
        let documented: BTreeSet<&str> = documented.iter().copied().collect();
        ensure!(exported == documented, "{series}: the labels are {exported:?}, not {documented:?}");
        checked += 1;
    }
    Ok(checked)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_exported_series_has_the_documented_labels() -> Result<()> {
    let flags = ["--workers=1", "--max-sequences=2", "--device=sim:flat,pool_tokens=400"];
    let cluster = LocalCluster::start(program(), &flags).await?;
    generate_eight(&cluster).await?;
    let worker = inflight_worker::metrics::INVENTORY.iter().map(|(name, ..)| *name);
    let worker = worker.map(|name| (name, inflight_worker::metrics::labels(name))).collect();
    let checked = check_labels(&scrape(cluster.workers[0].metrics).await?, &worker)?;
    ensure!(checked > 60, "{checked} series of the worker");
    let router =
        inflight_router::metrics::METRICS.iter().map(|metric| (metric.name, metric.labels)).collect();
    let checked = check_labels(&scrape(cluster.router.metrics).await?, &router)?;
    ensure!(checked > 60, "{checked} series of the router");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_service_of_a_thousand_tenants_has_a_hundred_labels_and_one_for_the_rest() -> Result<()> {
    const TENANTS: usize = 1000;
    const NAME: &str = "inflight_worker_tenant_service_tokens_total";
    let cluster = LocalCluster::start(program(), &["--workers=1", "--device=sim:flat"]).await?;
    let client = cluster.client().await?;
    let calls = (0..TENANTS).map(|tenant| {
        let mut client = client.clone();
        async move {
            // One of them is named like the label of the rest.
            let tenant = if tenant == 0 { "(other)".to_owned() } else { format!("tenant \"{tenant}\"\n") };
            generate(&mut client, GenerateRequest { tenant, ..sampled("a", 2, 1) }).await
        }
    });
    let answers = try_join_all(calls).await?;
    let prompts: u32 =
        answers.iter().filter_map(|answer| answer.usage.as_ref()).map(|usage| usage.prompt_tokens).sum();
    // Every prompt token is computed, for prefixes are cached by tenant; each output token counts twice.
    let service = f64::from(prompts) + 2.0 * 2.0 * TENANTS as f64;
    let worker = cluster.workers[0].metrics;
    let samples = eventually("all service is counted", || async {
        let samples = scrape(worker).await?;
        let total = samples.total(NAME)?;
        ensure!(total == service, "{total} of {service}");
        Ok(samples)
    })
    .await?;
    let tenants = series(&samples, NAME);
    ensure!(tenants.len() == 101, "{} labels", tenants.len());
    let rest = tenants["{tenant=\"(other)\"}"];
    ensure!(rest > service * 0.89 && rest < service * 0.91, "the rest has {rest} of {service}");
    ensure!(series(&samples, "inflight_worker_tenant_weight").values().all(|weight| *weight == 1.0));
    ensure!(series(&samples, "inflight_worker_tenant_weight").len() == 100);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn queueing_in_router_and_worker_is_one_histogram_and_every_limit_a_gauge() -> Result<()> {
    let flags = [
        "--workers=1",
        "--device=sim:flat,pool_tokens=16000",
        "--max-sequences=1",
        "--kv-watermark=0.05",
        "--preemption-threshold=3",
        "--bypass-max=7",
        "--decode-reserve-tokens=40",
    ];
    let cluster = LocalCluster::start(program(), &flags).await?;
    generate_eight(&cluster).await?;
    let samples = scrape(cluster.workers[0].metrics).await?;
    let total = |name: &str| samples.total(name);
    ensure!(total("inflight_worker_total_queue_seconds_count")? == 8.0);
    // One at a time, each for 100 steps of 2 ms: they wait for 0 to 7 others, mostly at the router.
    let (both, worker) =
        (total("inflight_worker_total_queue_seconds_sum")?, total("inflight_worker_queue_seconds_sum")?);
    ensure!(both > 28.0 * 0.2 && both > worker, "{both} s in all, {worker} s at the worker");
    let router = scrape(cluster.router.metrics).await?;
    let at_router = router.total("inflight_router_queue_seconds_sum")?;
    ensure!(
        (both - worker - at_router).abs() < 1.0,
        "{both} s in all, {worker} s and {at_router} s in parts"
    );
    for (name, limit) in [
        ("inflight_worker_kv_watermark_blocks", 50.0),
        ("inflight_worker_preemption_threshold", 3.0),
        ("inflight_worker_bypass_max", 7.0),
        ("inflight_worker_decode_reserve_tokens", 40.0),
        ("inflight_worker_sequences_max", 1.0),
        ("inflight_worker_drafts_max", 0.0),
        ("inflight_worker_sessions_max", 64.0),
    ] {
        ensure!(total(name)? == limit, "{name} is {}", total(name)?);
    }
    for name in [
        "queue_requests_max",
        "queue_tokens_max",
        "open_calls_max",
        "receive_bytes_max",
        "unread_bytes_max",
        "bypass_max",
    ] {
        ensure!(router.total(&format!("inflight_router_{name}"))? > 0.0, "{name}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn both_roles_export_the_names_that_autoscalers_and_gateways_of_vllm_read() -> Result<()> {
    let flags = ["--workers=1", "--metrics-compat=vllm"];
    let cluster = LocalCluster::start(program(), &flags).await?;
    let mut client = cluster.client().await?;
    let name = model(&mut client).await?.name;
    for seed in 0..3 {
        generate(&mut client, sampled(&"Once upon a time, ".repeat(20), 20, seed)).await?;
    }
    let label = format!("{{model_name=\"{name}\"}}");
    let (router, worker) = (cluster.router.metrics, cluster.workers[0].metrics);
    // Gauges of models are set at the router's next tick.
    eventually("the router knows its model", || async {
        let waiting = series(&scrape(router).await?, "vllm:num_requests_waiting");
        ensure!(waiting.get(&label) == Some(&0.0), "{waiting:?}");
        Ok(())
    })
    .await?;
    // A worker reports its load after each iteration and with each heartbeat, a router at its next tick; cached blocks are not in use.
    let (at_router, at_worker) = eventually("both show an idle worker", || async {
        let samples = (scrape(router).await?, scrape(worker).await?);
        for samples in [&samples.0, &samples.1] {
            for name in ["vllm:num_requests_running", "vllm:kv_cache_usage_perc"] {
                let values = series(samples, name);
                ensure!(values.get(&label) == Some(&0.0), "{name}: {values:?}");
            }
        }
        Ok(samples)
    })
    .await?;
    let gaps = at_router.total("inflight_router_inter_token_seconds_count")?;
    ensure!((3.0..=57.0).contains(&gaps), "{gaps} gaps");
    for (samples, name, expected) in [
        (&at_router, "vllm:generation_tokens_total", 60.0),
        (&at_router, "vllm:time_to_first_token_seconds_count", 3.0),
        // Tokens that come together are one gap.
        (&at_router, "vllm:inter_token_latency_seconds_count", gaps),
        (&at_router, "vllm:time_per_output_token_seconds_count", gaps),
        (&at_router, "vllm:request_time_per_output_token_seconds_count", 3.0),
        (&at_router, "vllm:e2e_request_latency_seconds_count", 3.0),
        (&at_router, "vllm:num_requests_running", 0.0),
        (&at_worker, "vllm:num_requests_running", 0.0),
        (&at_worker, "vllm:num_requests_waiting", 0.0),
        (&at_worker, "vllm:kv_cache_usage_perc", 0.0),
        (&at_worker, "vllm:gpu_cache_usage_perc", 0.0),
        (&at_worker, "vllm:num_preemptions_total", 0.0),
        (&at_worker, "vllm:request_queue_time_seconds_count", 3.0),
    ] {
        let values = series(samples, name);
        let value = values.get(&label).with_context(|| format!("no {name}{label}: {values:?}"))?;
        ensure!(*value == expected, "{name} is {value}");
    }
    let finished = series(&at_router, "vllm:request_success_total");
    ensure!(finished.values().sum::<f64>() == 3.0, "{finished:?}");
    ensure!(finished.keys().all(|labels| labels.contains("finished_reason=\"length\"")), "{finished:?}");
    for (samples, name) in [
        (&at_router, "vllm:prompt_tokens_total"),
        (&at_worker, "vllm:prefix_cache_queries_total"),
        (&at_worker, "vllm:prefix_cache_hits_total"),
        (&at_worker, "vllm:iteration_tokens_total_count"),
    ] {
        ensure!(series(samples, name).get(&label).is_some_and(|value| *value > 0.0), "{name}");
    }
    let config = series(&at_worker, "vllm:cache_config_info");
    let blocks = at_worker.total("inflight_worker_kv_blocks")?;
    let expected = format!("block_size=\"16\",num_gpu_blocks=\"{blocks}\"}}");
    ensure!(config.keys().all(|labels| labels.ends_with(&expected)) && config.len() == 1, "{config:?}");
    // A sum over one role counts nothing twice; both have a part of the queue, and what gateways read of routers alone.
    let names = |samples: &Samples| -> Vec<String> {
        let names =
            samples.series().map(|(series, _)| series.split('{').next().unwrap_or_default().to_owned());
        names.filter(|name| name.starts_with("vllm:")).collect()
    };
    let of_worker = names(&at_worker);
    let both: Vec<_> = names(&at_router).into_iter().filter(|name| of_worker.contains(name)).collect();
    let parts =
        ["num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "gpu_cache_usage_perc"];
    let expected = parts.map(|part| format!("vllm:{part}"));
    ensure!(both.len() == expected.len() && both.iter().all(|name| expected.contains(name)), "{both:?}");
    ensure!(!scrape_has(&LocalCluster::start(program(), &["--workers=1"]).await?, "vllm:").await?);
    Ok(())
}

async fn scrape_has(cluster: &LocalCluster, prefix: &str) -> Result<bool> {
    let (router, worker) = (scrape(cluster.router.metrics).await?, scrape(cluster.workers[0].metrics).await?);
    Ok([router, worker].iter().any(|samples| samples.series().any(|(series, _)| series.starts_with(prefix))))
}
