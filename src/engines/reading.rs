//! What engines say of themselves: the model, the size of their KV pool, how loaded they are.

use http::StatusCode;
use serde_json::Value;

use super::fetch::{Fetch, Unwell};
use crate::core::types::Tokens;
use crate::wire::info::KvRole;

/// What an engine is. Read when it comes up.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reading {
    /// Models it serves; the first is its own, others are adapters or aliases.
    pub models: Vec<String>,
    /// Its KV pool in tokens, if it says so.
    pub k_d: Option<Tokens>,
    /// Fixed slots, each with one sequence; `None`: one pool of blocks that all sequences share.
    pub slots: Option<u32>,
    /// Tokens of one of its KV blocks.
    pub block: Option<u32>,
    /// What it was started as; empty: it does not say.
    pub roles: Vec<KvRole>,
    /// Where its P meets D workers: `host:port` of SGLang's bootstrap server, `engine@URL` of Mooncake's.
    pub meets: Option<String>,
}

/// How an engine does. Read every second.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Pulse {
    /// Requests it computes.
    pub running: Option<u32>,
    /// Requests that wait for it.
    pub waiting: Option<u32>,
    /// Share of its KV pool in use by running requests and what it keeps for others.
    pub used: Option<f64>,
    /// Tokens computed since it started: when this falls, it has started anew.
    pub work: Option<f64>,
}

/// A base URL and the way to it.
#[derive(Debug, Clone, Copy)]
pub(super) struct At<'a> {
    pub fetch: &'a Fetch,
    pub url: &'a str,
}

impl At<'_> {
    pub async fn get(&self, path: &str) -> Result<(StatusCode, bytes::Bytes), Unwell> {
        self.fetch.get(&format!("{}{path}", self.url)).await
    }

    /// Another port of its host.
    pub fn beside(&self, port: u64) -> Option<String> {
        let authority = self.url.split("://").nth(1)?.split('/').next()?;
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        Some(format!("{host}:{port}"))
    }

    /// JSON at a path; `None`: there is no such path.
    pub async fn json(&self, path: &str) -> Result<Option<Value>, Unwell> {
        let (status, body) = self.get(path).await?;
        match serde_json::from_slice(&body) {
            Ok(value) if status.is_success() => Ok(Some(value)),
            _ if matches!(status.as_u16(), 404 | 405 | 501) => Ok(None),
            _ => Err(Unwell::Unfit(format!("{path} answered {status}"))),
        }
    }

    /// Whether it is healthy, by a path that may not exist.
    pub async fn healthy(&self, path: &str) -> Result<(), Unwell> {
        let (status, _) = self.get(path).await?;
        match status {
            status if status.is_success() || matches!(status.as_u16(), 404 | 405) => Ok(()),
            status => Err(Unwell::Unfit(format!("{path} answered {status}"))),
        }
    }

    /// `GET /v1/models`: the names.
    pub async fn models(&self) -> Result<Vec<String>, Unwell> {
        let listed = self.json("/v1/models").await?;
        let data = listed.as_ref().and_then(|l| l["data"].as_array());
        let names: Vec<String> =
            data.into_iter().flatten().filter_map(|m| Some(m["id"].as_str()?.to_owned())).collect();
        match names.is_empty() {
            true => {
                Err(Unwell::Unfit("/v1/models lists no model: this is no OpenAI-compatible server".into()))
            }
            false => Ok(names),
        }
    }

    /// `GET /metrics` as Prometheus text; empty where there is none.
    pub async fn metrics(&self) -> Result<Metrics, Unwell> {
        let (status, body) = self.get("/metrics").await?;
        let text =
            if status.is_success() { String::from_utf8_lossy(&body).into_owned() } else { String::new() };
        Ok(Metrics(text))
    }
}

/// A page of Prometheus text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Metrics(pub String);

impl Metrics {
    /// Lines of a metric: its labels and its value.
    fn samples<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
        self.0.lines().filter_map(move |line| {
            let rest = line.strip_prefix(name)?;
            let (labels, value) = match rest.strip_prefix('{') {
                Some(rest) => rest.rsplit_once('}')?,
                None => ("", rest.strip_prefix(' ').map(|_| rest)?),
            };
            Some((labels, value.trim().split(' ').next()?.parse().ok()?))
        })
    }

    /// The sum of a metric's samples; `None` without any.
    pub fn sum(&self, name: &str) -> Option<f64> {
        self.samples(name).map(|(_, value)| value).reduce(|a, b| a + b)
    }

    /// The greatest of a metric's samples.
    pub fn max(&self, name: &str) -> Option<f64> {
        self.samples(name).map(|(_, value)| value).reduce(f64::max)
    }

    /// A count.
    pub fn count(&self, name: &str) -> Option<u32> {
        self.sum(name).map(|value| value as u32)
    }

    /// A label of a metric's first sample.
    pub fn label<'a>(&'a self, name: &'a str, label: &str) -> Option<&'a str> {
        let (labels, _) = self.samples(name).next()?;
        let start = labels.find(&format!("{label}=\""))? + label.len() + 2;
        labels[start..].split('"').next()
    }
}

/// llama.cpp and whatever else speaks the OpenAI API.
pub(super) async fn openai(at: At<'_>) -> Result<Reading, Unwell> {
    at.healthy("/health").await?;
    let models = at.models().await?;
    // llama.cpp's own path. A server that answers something else there is no llama.cpp.
    let props = at.json("/props").await.unwrap_or_default().unwrap_or_default();
    let slots = props["total_slots"].as_u64().filter(|slots| *slots > 0);
    let each = props["default_generation_settings"]["n_ctx"].as_u64();
    let k_d = each.zip(slots).map(|(each, slots)| each * slots);
    Ok(Reading { models, k_d, slots: slots.and_then(|s| u32::try_from(s).ok()), ..Reading::default() })
}

/// [`openai`]'s pulse.
pub(super) async fn openai_pulse(at: At<'_>) -> Result<Pulse, Unwell> {
    at.healthy("/health").await?;
    let metrics = at.metrics().await?;
    Ok(Pulse {
        running: metrics.count("llamacpp:requests_processing"),
        waiting: metrics.count("llamacpp:requests_deferred"),
        used: None,
        work: metrics.sum("llamacpp:prompt_tokens_total"),
    })
}

/// vLLM: everything is on its metrics page.
pub(super) async fn vllm(at: At<'_>) -> Result<Reading, Unwell> {
    at.healthy("/health").await?;
    let (models, metrics) = (at.models().await?, at.metrics().await?);
    let config = |label| metrics.label("vllm:cache_config_info", label)?.parse::<u64>().ok();
    let (blocks, block) = (config("num_gpu_blocks"), config("block_size"));
    // One block of each engine is never used.
    let k_d = blocks.zip(block).map(|(blocks, block)| blocks.saturating_sub(1) * block);
    Ok(Reading { models, k_d, block: block.and_then(|b| u32::try_from(b).ok()), ..Reading::default() })
}

/// [`vllm`]'s pulse.
pub(super) async fn vllm_pulse(at: At<'_>) -> Result<Pulse, Unwell> {
    at.healthy("/health").await?;
    let metrics = at.metrics().await?;
    Ok(Pulse {
        running: metrics.count("vllm:num_requests_running"),
        waiting: metrics.count("vllm:num_requests_waiting"),
        used: metrics.max("vllm:kv_cache_usage_perc"),
        work: metrics.sum("vllm:prompt_tokens_total"),
    })
}

/// SGLang: `/server_info` has everything.
pub(super) async fn sglang(at: At<'_>) -> Result<Reading, Unwell> {
    let models = at.models().await?;
    let info = at.json("/server_info").await?;
    let info = info.ok_or_else(|| Unwell::Unfit("it has no /server_info: this is no SGLang".into()))?;
    let roles = match info["disaggregation_mode"].as_str() {
        Some("prefill") => vec![KvRole::Prefill],
        Some("decode") => vec![KvRole::Decode],
        other => {
            let found = other.unwrap_or("nothing");
            return Err(Unwell::Unfit(format!(
                "it was started with `--disaggregation-mode {found}`; `prefill` or `decode` is needed \
                 (a server that does both is served by `fleet.engine = \"openai\"`)"
            )));
        }
    };
    let port = info["disaggregation_bootstrap_port"].as_u64();
    let block = info["page_size"].as_u64().and_then(|b| u32::try_from(b).ok());
    let k_d = info["max_total_num_tokens"].as_u64();
    let k_d = k_d.or_else(|| info["internal_states"][0]["max_total_num_tokens"].as_u64());
    Ok(Reading {
        models,
        k_d,
        block,
        roles,
        meets: port.and_then(|port| at.beside(port)),
        ..Reading::default()
    })
}

/// [`sglang`]'s pulse. `/health` would generate a token; `/v1/loads` is cheap.
pub(super) async fn sglang_pulse(at: At<'_>) -> Result<Pulse, Unwell> {
    let loads = at.json("/v1/loads?include=core").await?.unwrap_or_default();
    let ranks = loads["loads"].as_array().or(loads.as_array());
    let sum = |names: [&str; 2]| {
        let of = |rank: &Value| names.iter().find_map(|name| rank[*name].as_u64());
        ranks.map(|ranks| ranks.iter().filter_map(of).sum::<u64>() as u32)
    };
    Ok(Pulse {
        running: sum(["num_running_reqs", "num_running"]),
        waiting: sum(["num_waiting_reqs", "num_waiting"]),
        used: ranks.and_then(|r| r.first()).and_then(|rank| rank["token_usage"].as_f64()),
        work: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_read_by_name_and_label() {
        let page = Metrics(
            "# HELP a x\nvllm:n{engine=\"0\",model_name=\"m\"} 2.0\nvllm:n{engine=\"1\"} 3\nvllm:n_more 9\n\
             vllm:cache_config_info{block_size=\"32\",engine=\"0\",num_gpu_blocks=\"256\"} 1.0\nplain 7 1700\nbad{ 1"
                .into(),
        );
        assert_eq!(
            (page.sum("vllm:n"), page.max("vllm:n"), page.count("plain")),
            (Some(5.0), Some(3.0), Some(7))
        );
        assert_eq!((page.sum("vllm"), page.sum("bad"), page.sum("absent")), (None, None, None));
        assert_eq!(page.label("vllm:cache_config_info", "num_gpu_blocks"), Some("256"));
        assert_eq!(page.label("vllm:cache_config_info", "absent"), None);
    }
}
