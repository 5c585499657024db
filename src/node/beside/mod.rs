//! A node beside an engine that knows nothing of it: the keeper behind the node protocol, and the engine's own API in
//! front of the engine. Gateways send the legs of turns here, so the node sees when a turn begins, what it used and how
//! it ended, and several gateways can share one engine.
//!
//! The API side is the gateway's own machinery with one worker: relay, errors, observation of answers.

mod backend;
mod routes;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use actix_web::http::header::{AUTHORIZATION, HeaderMap};
use actix_web::web::{Data, ServiceConfig};
use subtle::ConstantTimeEq as _;
use tokio::task::JoinHandle;

use crate::actors::api::WorkerRef;
use crate::actors::gate::Gate;
use crate::actors::slot::Role;
use crate::core::types::WorkerId;
use crate::engines::client::Connector;
use crate::engines::fetch::Fetch;
use crate::engines::{Engine, EngineKind};
use crate::http::Gateway;
use crate::http::server::{self, BindError, Serving};
use crate::keeper::{Config, Keeper};
use crate::settings::keys::ApiKey;
use crate::settings::{Auth, Counting, NodeRole, Secret, Settings};
use crate::wire::info::{KvRole, NodeInfo};

/// Between two attempts to reach an engine that is not up.
const RETRY: Duration = Duration::from_millis(500);

/// A running node. Clones share it.
#[derive(Clone)]
pub struct Beside(Arc<Inner>);

struct Inner {
    keeper: Arc<Keeper>,
    at: WorkerRef,
    roles: Vec<KvRole>,
    name: String,
    /// What it says of itself while its engine is up.
    info: Mutex<Result<NodeInfo, String>>,
    gate: Arc<Gate>,
    key: Secret,
    draining: AtomicBool,
    requests: AtomicU64,
    watch: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(watch) = self.watch.lock().unwrap_or_else(PoisonError::into_inner).take() {
            watch.abort();
        }
    }
}

impl Beside {
    /// Listens on `node.listen` for the engine at `node.engine_url`, and looks after that from now on. The returned
    /// server serves when it is awaited.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub fn start(settings: &Settings) -> Result<(Self, Serving), BindError> {
        let (fleet, node) = (&settings.fleet, &settings.node);
        let config = Config {
            engine: fleet.engine(),
            options: settings.options.clone(),
            k_d: fleet.k_d,
            kv_events: fleet.kv_events(),
            exact: settings.sessions.tokens == Counting::Tokens,
        };
        let connector = Connector::new(fleet).map_err(BindError::Tls)?;
        let fetch = Fetch::new(&connector);
        let keeper = Keeper::new(node.engine_url.as_str().into(), Arc::new(config), fetch);
        let roles = node.roles.iter().filter_map(|role| match role {
            NodeRole::Prefill => Some(KvRole::Prefill),
            NodeRole::Decode => Some(KvRole::Decode),
            NodeRole::PrefillBackupReceiver | NodeRole::DecodeBackupSender => None,
        });
        let at = WorkerRef {
            id: WorkerId(0),
            role: Role::Decode,
            name: node.engine_url.as_str().into(),
            url: node.engine_url.as_str().into(),
            kv_addr: None,
        };
        let beside = Self(Arc::new(Inner {
            keeper,
            at,
            roles: roles.collect(),
            name: node.listen.clone(),
            info: Mutex::new(Err("its engine was not reached yet".into())),
            gate: Gate::new(settings.http.max_inflight),
            key: fleet.worker_key.clone(),
            draining: AtomicBool::new(false),
            requests: AtomicU64::new(1),
            watch: Mutex::default(),
        }));
        let mut own = settings.clone();
        own.http.listen = node.listen.clone();
        own.http.admin_listen.clear();
        // Gateways show the workers' key, if there is one; nobody else's opens anything here.
        own.http.auth = if fleet.worker_key.get().is_some() { Auth::Keys } else { Auth::Open };
        own.http.keys = fleet.worker_key.get().map(worker_key).into_iter().collect();
        own.http.keys_file.clear();
        // The legs come ready for the engine: they pass, whatever its kind.
        let engine = Engine::stock(EngineKind::Openai);
        let gateway = Gateway::over(&own, engine, beside.clone(), connector);
        let routes = beside.clone();
        let configure = move |app: &mut ServiceConfig| {
            app.app_data(Data::new(routes.clone()));
            routes::configure(app);
        };
        let serving = server::start_with(gateway, configure)?;
        beside.look_after();
        Ok((beside, serving))
    }

    /// Takes no new turns; those that run and those with a lease go on.
    pub fn drain(&self) {
        self.0.draining.store(true, Ordering::Relaxed);
    }

    fn draining(&self) -> bool {
        self.0.draining.load(Ordering::Relaxed)
    }

    /// Whether a request shows the workers' key, if there is one.
    fn is_shown_key(&self, headers: &HeaderMap) -> bool {
        let Some(key) = self.0.key.get() else { return true };
        let shown = headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        shown.is_some_and(|shown| shown.ct_eq(key.as_bytes()).into())
    }

    /// What it is, or why nothing can be served.
    fn info(&self) -> Result<NodeInfo, String> {
        self.0.info.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn look_after(&self) {
        let inner = Arc::downgrade(&self.0);
        let keeper = self.0.keeper.clone();
        let task = tokio::spawn(async move {
            let mut said = None;
            loop {
                let met = keeper.meet().await;
                let Some(node) = inner.upgrade() else { return };
                let up = met.is_ok();
                let info = met.map_err(|unwell| unwell.to_string()).and_then(|info| node.fits(info));
                if let Err(why) = &info
                    && said.as_ref() != Some(why)
                {
                    tracing::warn!(engine = %node.at.url, why, "the engine cannot be used");
                    said = Some(why.clone());
                }
                node.tell(info);
                drop(node);
                if up {
                    let why = keeper.watch().await.to_string();
                    let Some(node) = inner.upgrade() else { return };
                    tracing::warn!(engine = %node.at.url, why, "the engine is gone");
                    node.tell(Err(why));
                } else {
                    tokio::time::sleep(RETRY).await;
                }
            }
        });
        *self.0.watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
    }
}

/// The workers' key as one of the API side's.
fn worker_key(key: &str) -> String {
    let (name, sha256) = ("worker".to_owned(), ApiKey::hash(key.as_bytes()));
    ApiKey { name, sha256, max_inflight: None, per_minute: None, admin: true }.to_string()
}

impl Inner {
    fn tell(&self, info: Result<NodeInfo, String>) {
        *self.info.lock().unwrap_or_else(PoisonError::into_inner) = info;
    }

    /// The engine's information with this node's name and roles in it.
    fn fits(&self, info: NodeInfo) -> Result<NodeInfo, String> {
        match self.roles.iter().find(|role| !info.roles.contains(role)) {
            Some(role) => Err(format!("this node is {role:?}, its engine was started as {:?}", info.roles)),
            None => Ok(NodeInfo {
                name: self.name.clone(),
                roles: self.roles.clone(),
                // Handing back is between engines; a gateway asks for it where it keeps the books itself.
                d2p_addr: None,
                ..info
            }),
        }
    }
}
