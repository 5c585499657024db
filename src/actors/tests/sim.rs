//! A fleet in memory: real ledgers behind the transport trait, with faults switched on per worker.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_core::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::time::Instant;

use crate::actors::api::{DispatchPlan, TurnRequest, TurnResult, WorkerRef};
use crate::actors::grant::Grant;
use crate::actors::handle::{TurnRouter, WorkerSpec};
use crate::actors::shared::Config;
use crate::actors::slot::Role;
use crate::actors::transport::{EventStream, Transport, TransportError};
use crate::core::ledger::{AdmitReply, AdmitRequest, Ledger, LedgerEvent};
use crate::core::options::Options;
use crate::core::types::{BlockHash, Millis, SessionId, StopKind, Tokens};
use crate::wire::PROTOCOL;
use crate::wire::admit::{AdmitAnswer, AdmitHead, Lease, LeaseCall};
use crate::wire::events::{NodeEvent, Numbered, Snapshot};
use crate::wire::info::{KvRole, NodeInfo};

pub const BLOCK: Tokens = 24;

/// What goes wrong at a worker.
#[derive(Debug, Default, Clone)]
pub struct Faults {
    /// Nothing gets through.
    pub down: bool,
    /// Admit replies to lose after their effect.
    pub lose_admit_replies: u32,
    /// Connections stay open and nothing comes.
    pub frozen: bool,
    /// Every Admit answer takes this long.
    pub admit_delay: Duration,
}

struct Inner {
    ledger: Ledger,
    seq: u64,
    subscribers: Vec<UnboundedSender<Numbered>>,
    faults: Faults,
    admits: u32,
    backups: Vec<BlockHash>,
    news: Vec<LedgerEvent>,
}

/// One simulated node.
pub struct SimNode {
    inner: Mutex<Inner>,
    started: Instant,
    options: Options,
    k_d: Tokens,
}

impl SimNode {
    fn new(options: &Options, k_d: Tokens, epoch: u64) -> Self {
        let inner = Inner {
            ledger: Ledger::new(options.clone(), k_d, epoch),
            seq: 0,
            subscribers: Vec::new(),
            faults: Faults::default(),
            admits: 0,
            backups: Vec::new(),
            news: Vec::new(),
        };
        Self { inner: Mutex::new(inner), started: Instant::now(), options: options.clone(), k_d }
    }

    fn now(&self) -> Millis {
        self.started.elapsed().as_millis() as Millis
    }

    /// Works on the ledger and publishes what changed.
    pub fn with<T>(&self, work: impl FnOnce(&mut Ledger, Millis) -> T) -> T {
        let now = self.now();
        let mut inner = self.inner.lock().unwrap();
        let result = work(&mut inner.ledger, now);
        publish(&mut inner);
        result
    }

    /// The backup tier takes blocks.
    pub fn back_up(&self, blocks: &[BlockHash]) {
        let mut inner = self.inner.lock().unwrap();
        inner.backups.extend_from_slice(blocks);
        inner.news.push(LedgerEvent::BackedUp(blocks.to_vec()));
        publish(&mut inner);
    }

    /// The backup tier drops everything.
    pub fn drop_backups(&self) {
        let mut inner = self.inner.lock().unwrap();
        let dropped = std::mem::take(&mut inner.backups);
        inner.news.push(LedgerEvent::BackupDropped(dropped));
        publish(&mut inner);
    }

    pub fn faults(&self, change: impl FnOnce(&mut Faults)) {
        let mut inner = self.inner.lock().unwrap();
        change(&mut inner.faults);
        if inner.faults.down {
            inner.subscribers.clear();
        }
    }

    pub fn admits(&self) -> u32 {
        self.inner.lock().unwrap().admits
    }

    /// A new incarnation: empty, next epoch, streams broken.
    pub fn restart(&self) {
        let mut inner = self.inner.lock().unwrap();
        let epoch = inner.ledger.epoch() + 1;
        inner.ledger = Ledger::new(self.options.clone(), self.k_d, epoch);
        inner.seq = 0;
        inner.subscribers.clear();
    }

    /// Never returns while the node is frozen.
    async fn thawed(&self) {
        while self.inner.lock().unwrap().faults.frozen {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn up(&self) -> Result<(), TransportError> {
        if self.inner.lock().unwrap().faults.down {
            return Err(TransportError::Connect("refused".into()));
        }
        Ok(())
    }

    async fn admit(&self, head: AdmitHead, appended: &[BlockHash]) -> Result<AdmitAnswer, TransportError> {
        self.up()?;
        let delay = self.inner.lock().unwrap().faults.admit_delay;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        self.up()?;
        let answer = self.with(|ledger, now| {
            let known = head.known as usize;
            let held = ledger.residency().get(&head.session).map_or(&[][..], |h| &h.chain);
            if known > 0 && held.get(known - 1).copied() != head.known_hash {
                return AdmitAnswer::Resend;
            }
            let mut chain = held[..known].to_vec();
            chain.extend_from_slice(appended);
            let request = AdmitRequest {
                request_id: head.request_id.clone(),
                session: head.session.clone(),
                turn: head.turn,
                chain: chain.into(),
                input_len: head.input_len,
                output_reserve: head.output_reserve,
            };
            match ledger.admit(&request, now) {
                AdmitReply::Admitted { mode, reuse_blocks, reserved, expires_at, terms } => {
                    let lease = Lease {
                        request_id: head.request_id,
                        epoch: ledger.epoch(),
                        tokens: reserved,
                        ttl_ms: expires_at - now,
                    };
                    AdmitAnswer::Admitted { lease, mode, reuse_blocks, terms }
                }
                AdmitReply::Rejected { reason, terms } => AdmitAnswer::Rejected { reason, terms },
                AdmitReply::Stale => AdmitAnswer::Stale,
            }
        });
        let lost = {
            let mut inner = self.inner.lock().unwrap();
            inner.admits += 1;
            let lose = inner.faults.lose_admit_replies > 0;
            inner.faults.lose_admit_replies -= u32::from(lose);
            lose
        };
        if lost {
            std::future::pending::<()>().await;
        }
        Ok(answer)
    }

    fn subscribe(&self) -> EventStream {
        let mut inner = self.inner.lock().unwrap();
        let (sender, mut receiver) = unbounded_channel();
        let sessions = inner
            .ledger
            .residency()
            .sessions()
            .map(|(id, held)| (id.clone(), held.tokens, held.chain.clone()))
            .collect();
        let snapshot = Snapshot { sessions, backups: inner.backups.clone(), load: inner.ledger.load() };
        let first =
            Numbered { epoch: inner.ledger.epoch(), seq: inner.seq, event: NodeEvent::Snapshot(snapshot) };
        let _ = sender.send(first);
        inner.subscribers.push(sender);
        let changes = futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx)).map(Ok);
        changes.boxed()
    }
}

fn publish(inner: &mut Inner) {
    let mut events = inner.ledger.take_events();
    events.append(&mut inner.news);
    let load = inner.ledger.load();
    let epoch = inner.ledger.epoch();
    for event in [(!events.is_empty()).then_some(NodeEvent::Changes(events)), Some(NodeEvent::Load(load))]
        .into_iter()
        .flatten()
    {
        inner.seq += u64::from(matches!(event, NodeEvent::Changes(_)));
        let message = Numbered { epoch, seq: inner.seq, event };
        inner.subscribers.retain(|s| s.send(message.clone()).is_ok());
    }
}

/// The network.
pub struct SimNet {
    pub nodes: HashMap<Arc<str>, Arc<SimNode>>,
}

impl SimNet {
    fn node(&self, at: &WorkerRef) -> Arc<SimNode> {
        self.nodes[&at.name].clone()
    }
}

impl Transport for SimNet {
    fn info<'a>(&'a self, at: &'a WorkerRef) -> BoxFuture<'a, Result<NodeInfo, TransportError>> {
        let node = self.node(at);
        async move {
            node.thawed().await;
            node.up()?;
            let inner = node.inner.lock().unwrap();
            Ok(NodeInfo {
                protocol: PROTOCOL,
                name: at.name.to_string(),
                epoch: inner.ledger.epoch(),
                roles: vec![KvRole::Decode, KvRole::Prefill],
                model: "sim".into(),
                k_d: node.k_d,
                block_tokens: 24,
                kv_bytes_per_token: 64,
                kv_addr: None,
                d2p_addr: at.name.starts_with('p').then(|| format!("{}:22000", at.name)),
            })
        }
        .boxed()
    }

    fn admit<'a>(
        &'a self,
        at: &'a WorkerRef,
        head: AdmitHead,
        appended: &'a [BlockHash],
    ) -> BoxFuture<'a, Result<AdmitAnswer, TransportError>> {
        let node = self.node(at);
        async move { node.admit(head, appended).await }.boxed()
    }

    fn release<'a>(
        &'a self,
        at: &'a WorkerRef,
        call: LeaseCall,
    ) -> BoxFuture<'a, Result<(), TransportError>> {
        let node = self.node(at);
        async move {
            node.up()?;
            node.with(|ledger, now| ledger.release(&call.request_id, now));
            Ok(())
        }
        .boxed()
    }

    fn events<'a>(&'a self, at: &'a WorkerRef) -> BoxFuture<'a, Result<EventStream, TransportError>> {
        let node = self.node(at);
        async move {
            node.up()?;
            Ok(node.subscribe())
        }
        .boxed()
    }
}

/// A router over simulated workers.
pub struct Lab {
    pub router: TurnRouter,
    pub net: Arc<SimNet>,
}

impl Lab {
    /// `p` P workers and `d` D workers of `k_d` tokens, all connected.
    pub async fn start(options: Options, p: usize, d: usize, k_d: Tokens) -> Self {
        Self::with(Config { options: Arc::new(options), ..Config::default() }, p, d, k_d).await
    }

    pub async fn with(config: Config, p: usize, d: usize, k_d: Tokens) -> Self {
        let spec = |name: String, role| WorkerSpec { url: format!("http://{name}"), name, role };
        let workers: Vec<_> = (0..d)
            .map(|i| spec(format!("d{i}"), Role::Decode))
            .chain((0..p).map(|i| spec(format!("p{i}"), Role::Prefill)))
            .collect();
        let node = |w: &WorkerSpec| {
            let name: Arc<str> = w.name.as_str().into();
            (name, Arc::new(SimNode::new(&config.options, k_d, 1)))
        };
        let net = Arc::new(SimNet { nodes: workers.iter().map(node).collect() });
        let router = TurnRouter::start(config, workers, net.clone()).await.unwrap();
        assert!(router.all_up(Duration::from_secs(10)).await);
        Self { router, net }
    }

    pub fn node(&self, name: &str) -> &SimNode {
        &self.net.nodes[name]
    }

    /// What a D does with a granted turn: starts it, holds it, commits prompt and output.
    pub fn serve(&self, plan: &DispatchPlan, request: &TurnRequest, output_blocks: usize) -> bool {
        let node = self.node(&plan.decode.name);
        node.with(|ledger, now| {
            let id = &plan.request_id;
            let ask = AdmitRequest {
                request_id: id.clone(),
                session: plan.session.clone(),
                turn: request.turn,
                chain: request.chain.clone(),
                input_len: request.input_len,
                output_reserve: output_blocks as Tokens * BLOCK,
            };
            let started = if plan.lease.is_some() { ledger.start(id, now) } else { ledger.force(&ask, now) };
            if started.is_err() {
                return false;
            }
            let chain = grown(&request.chain, output_blocks);
            if plan.one_shot {
                ledger.release(id, now);
            } else {
                let tokens = request.input_len + output_blocks as Tokens * BLOCK;
                ledger.commit(id, &chain, tokens, StopKind::ToolUse, now);
            }
            true
        })
    }

    /// Routes, serves and finishes one turn.
    pub async fn turn(&self, request: TurnRequest) -> DispatchPlan {
        let grant: Grant = self.router.route(request.clone()).await.unwrap();
        let plan = grant.plan.clone();
        assert!(self.serve(&plan, &request, 1));
        grant.finished(TurnResult { completion_tokens: Some(BLOCK), ..TurnResult::default() });
        settle().await;
        plan
    }

    /// Nothing is left of any turn: no lease, no inflight, no permit.
    pub async fn assert_clean(&self) {
        settle().await;
        for (name, node) in &self.net.nodes {
            let leases = node.inner.lock().unwrap().ledger.leases();
            assert_eq!(leases, 0, "{name} holds leases");
        }
        for worker in self.router.workers().await {
            assert_eq!((worker.inflight, worker.backlog_tokens), (0, 0), "{}", worker.name);
        }
        assert_eq!(self.router.inflight(), 0);
    }
}

/// Lets every message that is under way arrive; virtual time moves by 1 ms.
pub async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

/// The first `n` blocks of the prompt of `seed`.
pub fn chain(seed: u64, n: usize) -> Vec<BlockHash> {
    (0..n as u64).map(|i| BlockHash((seed << 32) + i)).collect()
}

/// A chain with the blocks of an answer behind it: the same the next prompt will have there.
fn grown(chain: &[BlockHash], more: usize) -> Vec<BlockHash> {
    let mut all = chain.to_vec();
    for _ in 0..more {
        let last = all.last().map_or(0, |b| b.0);
        all.push(BlockHash(last + 1));
    }
    all
}

pub fn request(session: &str, seed: u64, turn: u32, blocks: usize) -> TurnRequest {
    TurnRequest {
        session: SessionId::new(session),
        turn,
        chain: chain(seed, blocks).into(),
        input_len: blocks as Tokens * BLOCK,
        append_len: BLOCK,
        max_output: Some(BLOCK),
        one_shot: false,
        hint: None,
        explain: false,
    }
}
