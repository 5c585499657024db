//! Starting and stopping a node.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::core::types::BlockHash;
use crate::wire::PROTOCOL;
use crate::wire::info::{KvRole, NodeInfo};

use super::builtin::engine::Engine;
use super::builtin::kept::Kept;
use super::config::NodeConfig;
use super::d2p;
use super::http::{self, App};
use super::transfer::receive::{self, Receiver};

/// Why a node does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A setting is out of range.
    #[error("{key} = {value}: must be {allowed}")]
    Invalid {
        /// Which.
        key: &'static str,
        /// What it is.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// An address cannot be listened on.
    #[error("cannot listen on {addr}: {source}")]
    Bind {
        /// Which.
        addr: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
}

/// A running node. Dropping it stops it.
#[derive(Debug)]
pub struct Node {
    app: Arc<App>,
    http_addr: SocketAddr,
    kv_addr: Option<SocketAddr>,
    d2p_addr: Option<SocketAddr>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Node {
    /// Starts a node on the current tokio runtime; it serves when this returns.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start(config: NodeConfig) -> Result<Self, StartError> {
        if let Some((key, value, allowed)) = config.invalid() {
            return Err(StartError::Invalid { key, value, allowed });
        }
        let (http_listener, http_addr) = bind(SocketAddr::new(config.host, config.http_port)).await?;
        let (kv, kv_addr) = listener(&config, KvRole::Decode, config.kv_port).await?;
        let (d2p, d2p_addr) = listener(&config, KvRole::PrefillBackupReceiver, config.d2p_port).await?;
        let epoch = config.epoch.unwrap_or_else(|| rand::random::<u64>().max(1));
        let info = info(&config, epoch, kv_addr, d2p_addr);
        let engine = Engine::new(config, epoch);
        let app = Arc::new(App {
            engine,
            info,
            draining: AtomicBool::new(false),
            kept: Kept::default(),
            requests: AtomicU64::new(1),
        });
        let stop = CancellationToken::new();
        let task = tokio::spawn(serve(app.clone(), http_listener, kv, d2p, stop.clone()));
        Ok(Self { app, http_addr, kv_addr, d2p_addr, stop, task })
    }

    /// Where it serves HTTP.
    pub fn http_addr(&self) -> SocketAddr {
        self.http_addr
    }

    /// Its base URL, without a trailing slash.
    pub fn url(&self) -> String {
        format!("http://{}", self.http_addr)
    }

    /// Where P→D transfers arrive.
    pub fn kv_addr(&self) -> Option<SocketAddr> {
        self.kv_addr
    }

    /// Where D→P pushes arrive.
    pub fn d2p_addr(&self) -> Option<SocketAddr> {
        self.d2p_addr
    }

    /// What it says of itself.
    pub fn info(&self) -> &NodeInfo {
        &self.app.info
    }

    /// Its engine: books, queue, inbox.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.app.engine
    }

    /// Checks that every slot of the pool is accounted for exactly once.
    ///
    /// # Errors
    /// A sentence that says what does not add up.
    pub fn audit(&self) -> Result<(), String> {
        self.app.engine.with(|s, _| s.audit())
    }

    /// Fault injection: spoils the stored KV of one block. Returns whether the node holds it.
    pub fn poison(&self, block: BlockHash) -> bool {
        self.app.engine.with(|s, _| s.pool.poison(block))
    }

    /// Fault injection: drops every backup, as a restart of the tier or other sessions' pushes would.
    pub fn drop_backups(&self) {
        self.app.engine.with(|s, _| s.drop_backups());
    }

    /// Takes no new turns and waits for those running and those with a lease, at most for `grace`. Then it stops. Returns
    /// how many there were, and how many of them were cut.
    pub async fn drain(self, grace: Duration) -> (usize, usize) {
        self.app.draining.store(true, Ordering::Relaxed);
        let deadline = Instant::now() + grace;
        let mut changes = self.app.engine.changes();
        let turns = || self.app.engine.with(|s, _| s.ledger.leases() + s.waiting.len());
        let before = turns();
        while turns() > 0 {
            if timeout_at(deadline, changes.changed()).await.is_err() {
                break;
            }
        }
        let cut = turns();
        self.stop().await;
        (before, cut)
    }

    /// Stops at once: connections are cut, running turns are cancelled.
    pub async fn stop(mut self) {
        self.stop.cancel();
        // A panic of the server's own task has been reported by the runtime.
        (&mut self.task).await.ok();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn bind(addr: SocketAddr) -> Result<(TcpListener, SocketAddr), StartError> {
    let listen = async {
        let listener = TcpListener::bind(addr).await?;
        let addr = listener.local_addr()?;
        Ok((listener, addr))
    };
    listen.await.map_err(|source| StartError::Bind { addr, source })
}

/// A listener of its own for a role, if the node has it.
async fn listener(
    config: &NodeConfig,
    role: KvRole,
    port: u16,
) -> Result<(Option<TcpListener>, Option<SocketAddr>), StartError> {
    if !config.roles.contains(&role) {
        return Ok((None, None));
    }
    let (listener, addr) = bind(SocketAddr::new(config.host, port)).await?;
    Ok((Some(listener), Some(addr)))
}

fn info(
    config: &NodeConfig,
    epoch: u64,
    kv_addr: Option<SocketAddr>,
    d2p_addr: Option<SocketAddr>,
) -> NodeInfo {
    let reached = |addr: SocketAddr| match &config.advertise {
        Some(host) => format!("{host}:{}", addr.port()),
        None => addr.to_string(),
    };
    NodeInfo {
        protocol: PROTOCOL,
        name: config.name.clone(),
        epoch,
        roles: config.roles.iter().copied().collect(),
        model: config.model.clone(),
        k_d: config.k_d,
        block_tokens: config.options.block_tokens,
        kv_bytes_per_token: config.kv.kv_bytes_per_token,
        kv_addr: kv_addr.map(reached),
        d2p_addr: d2p_addr.map(reached),
    }
}

async fn serve(
    app: Arc<App>,
    http: TcpListener,
    kv: Option<TcpListener>,
    d2p: Option<TcpListener>,
    stop: CancellationToken,
) {
    // However this ends, the threads of its own end too.
    let _ends = stop.clone().drop_guard();
    let engine = app.engine.clone();
    let limits = &engine.config.limits;
    let receiver = Arc::new(Receiver {
        hello: engine.hello(),
        block_bytes: engine.config.kv.block_bytes(),
        idle: limits.transfer_idle,
        max_connections: limits.transfer_connections,
        inbox: engine.inbox.clone(),
    });
    let kv = async {
        match kv {
            Some(listener) => receive::listen(receiver, listener).await,
            None => std::future::pending().await,
        }
    };
    if let Some(listener) = d2p {
        let engine = engine.clone();
        d2p::apart("d2p-receive", stop.clone(), async move || d2p::receive::listen(engine, listener).await);
    }
    if engine.sync.rule.is_some() {
        let engine = engine.clone();
        d2p::apart("d2p-push", stop.clone(), async move || engine.push_backups().await);
    }
    let tick = async {
        let mut ticks = interval(Engine::TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            engine.tick();
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = http::listen(app, http) => {}
        () = kv => {}
        () = tick => {}
    }
}

/// Waits for SIGINT or SIGTERM.
pub async fn until_told_to_stop() {
    use tokio::signal::unix::{SignalKind, signal};
    match signal(SignalKind::terminate()) {
        Ok(mut terminate) => {
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
        }
        Err(error) => {
            tracing::warn!(%error, "cannot wait for signals");
            std::future::pending::<()>().await;
        }
    }
}
