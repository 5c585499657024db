//! How fast a D→P push is, against what a plain TCP stream reaches in the same run (rollout phase P2 of the sync
//! document: a round trip under 50 ms, at least half of what the link can do).

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use crate::core::options::D2pTrigger;
use crate::core::types::{BlockHash, SessionId, Tokens};
use crate::wire::info::KvRole;

use super::super::builtin::model::{KvBytes, Model};
use super::super::{Clock, Node, NodeConfig};
use super::sender::Cause;

/// Distinct blocks that are sent over and over under new hashes.
const DISTINCT: usize = 16;
/// Round trips measured; the median counts.
const ROUND_TRIPS: usize = 51;
/// Bandwidth is measured so often in turn; the best of each counts, since whatever else runs only slows.
const ROUNDS: usize = 9;
/// Bytes per read of the plain stream.
const PIECE: usize = 256 << 10;

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// KV of a token in bytes.
    pub kv_bytes_per_token: u32,
    /// Tokens pushed at once.
    pub tokens: Tokens,
}

/// The figures.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct KvFigures {
    /// Offer, answer, one block, acknowledgement: the median in ms.
    pub block_rtt_ms: f64,
    /// KV bandwidth of a push in GiB/s, stored and acknowledged.
    pub gib_s: f64,
    /// Bandwidth of a plain TCP stream between the same two ends in GiB/s.
    pub plain_tcp_gib_s: f64,
    /// The one as a share of the other.
    pub share: f64,
}

struct Ends {
    d: Node,
    p: Node,
    blocks: Vec<KvBytes>,
    next: u64,
}

/// Measures a push between two nodes of this process, over the loopback interface.
///
/// # Errors
/// One line: the nodes do not start, or a push fails.
pub async fn run(load: Load) -> Result<KvFigures, String> {
    let mut ends = Ends::start(load).await?;
    let count = load.tokens.div_ceil(24) as usize;
    let bytes = count * ends.blocks[0].len();
    // The first push fills the tier: from then on memory is used again, as on a node that runs for a while.
    ends.push(count).await?;
    let (mut push, mut plain) = (Duration::MAX, Duration::MAX);
    for _ in 0..ROUNDS {
        plain = plain.min(plain_stream(&ends.blocks, count).await.map_err(|e| e.to_string())?);
        push = push.min(ends.push(count).await?);
    }
    let mut trips = Vec::new();
    for _ in 0..ROUND_TRIPS {
        trips.push(ends.push(1).await?);
    }
    trips.sort();
    ends.p.audit()?;
    ends.d.stop().await;
    ends.p.stop().await;
    let gib_s = |time: Duration| round(bytes as f64 / f64::from(1 << 30) / time.as_secs_f64());
    Ok(KvFigures {
        block_rtt_ms: round(trips[ROUND_TRIPS / 2].as_secs_f64() * 1000.0),
        gib_s: gib_s(push),
        plain_tcp_gib_s: gib_s(plain),
        share: round(plain.as_secs_f64() / push.as_secs_f64()),
    })
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

impl Ends {
    async fn start(load: Load) -> Result<Self, String> {
        let kv = Model { kv_bytes_per_token: load.kv_bytes_per_token };
        let node = |name: &str, roles: [KvRole; 2]| {
            let mut config = NodeConfig::new(name, roles);
            // The real link is measured, not the modelled one.
            (config.kv, config.cost) = (kv, Clock { time_scale: 1e9, ..Clock::default() });
            config.options.d2p_trigger = D2pTrigger::Commit;
            config.limits.sync_queue_bytes = usize::MAX;
            config.d2p_host_tokens = Some((load.tokens / 4).max(24));
            config
        };
        let start = async |config| Node::start(config).await.map_err(|e| e.to_string());
        let p = start(node("p", [KvRole::Prefill, KvRole::PrefillBackupReceiver])).await?;
        let d = start(node("d", [KvRole::Decode, KvRole::DecodeBackupSender])).await?;
        let text = vec![b'x'; DISTINCT * crate::prompt::BLOCK_BYTES];
        Ok(Self { d, p, blocks: kv.blocks(None, &text), next: 0 })
    }

    /// Pushes `count` new blocks; returns how long it took until they were stored.
    async fn push(&mut self, count: usize) -> Result<Duration, String> {
        let blocks: Vec<_> = (0..count)
            .map(|i| (BlockHash(self.next + i as u64), self.blocks[i % self.blocks.len()].clone()))
            .collect();
        self.next += count as u64;
        let to = self.p.d2p_addr().map(|addr| addr.to_string()).unwrap_or_default();
        let (told, stored) = oneshot::channel();
        let started = Instant::now();
        let sync = &self.d.engine().sync;
        sync.enqueue_sync(&SessionId::new("bench"), blocks, &to, Cause::Evict, Some(told))
            .ok_or("the push was not taken")?;
        stored.await.map_err(|_| "the push failed")?;
        Ok(started.elapsed())
    }
}

/// Sends as many bytes through a plain stream; returns how long it took until the other side had them.
async fn plain_stream(blocks: &[KvBytes], count: usize) -> std::io::Result<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let to = listener.local_addr()?;
    let total = count * blocks[0].len();
    let reader = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await?;
        let (mut buffer, mut seen) = (vec![0; PIECE], 0);
        while seen < total {
            match stream.read(&mut buffer).await? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                n => seen += n,
            }
        }
        stream.write_all(b"!").await
    });
    let mut stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    let started = Instant::now();
    for i in 0..count {
        stream.write_all(&blocks[i % blocks.len()]).await?;
    }
    stream.read_exact(&mut [0]).await?;
    let took = started.elapsed();
    reader.await.map_err(std::io::Error::other)??;
    Ok(took)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn it_measures_at_any_size() {
        for kv_bytes_per_token in [64, 98_304] {
            let figures = run(Load { kv_bytes_per_token, tokens: 240 }).await.unwrap();
            assert!(figures.share > 0.0 && figures.block_rtt_ms > 0.0 && figures.gib_s > 0.0, "{figures:?}");
        }
    }
}
