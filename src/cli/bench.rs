//! `kvc-router bench`.

use clap::{Args, Subcommand};

use super::{Exit, bad_input, failure};
use crate::node::d2p::bench::{Load, run};

/// Measurements of the parts.
#[derive(Debug, Args)]
pub struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// D→P: round trip of one block, and bandwidth against a plain TCP stream.
    Kv(Kv),
}

#[derive(Debug, Args)]
struct Kv {
    /// KV bytes per token, 8 to 174000. Without it: 98304 (96 KiB), and in the table also smaller ones.
    #[arg(long, value_name = "BYTES")]
    kv_bytes_per_token: Option<u32>,
    /// Tokens pushed at once.
    #[arg(long, value_name = "TOKENS", default_value_t = 16_384)]
    tokens: u64,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// 96 KiB a token, as a large model has it.
const LARGE: u32 = 98_304;

impl Bench {
    pub(super) fn run(self) -> Exit {
        let What::Kv(kv) = self.what;
        let sizes = match kv.kv_bytes_per_token {
            Some(size) => vec![size],
            None if kv.json => vec![LARGE],
            None => vec![LARGE, 16_384, 1024],
        };
        if sizes.iter().any(|size| !(8..=174_000).contains(size)) || !(24..=1 << 20).contains(&kv.tokens) {
            return bad_input("bytes per token must be 8 to 174000, tokens 24 to 1048576");
        }
        let runtime = match tokio::runtime::Runtime::new() {
            Ok(runtime) => runtime,
            Err(problem) => return failure(problem),
        };
        if !kv.json {
            println!(
                "{:>12}{:>9}{:>14}{:>9}{:>13}{:>9}",
                "bytes/token", "tokens", "block RTT", "GiB/s", "plain TCP", "share"
            );
        }
        for kv_bytes_per_token in sizes {
            let figures = match runtime.block_on(run(Load { kv_bytes_per_token, tokens: kv.tokens })) {
                Ok(figures) => figures,
                Err(problem) => return failure(problem),
            };
            if kv.json {
                println!("{}", serde_json::json!(figures));
                continue;
            }
            println!(
                "{kv_bytes_per_token:>12}{:>9}{:>11.3} ms{:>9.2}{:>13.2}{:>8.0}%",
                kv.tokens,
                figures.block_rtt_ms,
                figures.gib_s,
                figures.plain_tcp_gib_s,
                100.0 * figures.share,
            );
        }
        Exit::Ok
    }
}
