//! The router for embedders: actors, sessions and gateway started together from settings.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use actix_web::web::ServiceConfig;

use crate::actors::api::TurnRequest;
use crate::actors::handle::{TurnRouter, WorkerSpec};
use crate::actors::session::Placed;
use crate::actors::shared::Config;
use crate::actors::slot::Role;
use crate::actors::transport::Transport;
use crate::core::breaker::Limits;
use crate::core::cost::CostModel;
use crate::engines::client::Connector;
use crate::engines::control::HttpTransport;
use crate::http::drain::Report;
use crate::http::errors::ApiError;
use crate::http::live::Live;
use crate::http::server::{self, BindError, Serving};
use crate::http::{Gateway, Source, Totals};
use crate::keeper::local::Keepers;
use crate::keeper::{self};
use crate::settings::{Admission, Counting, Sessions, Settings};
use crate::tokens::Exact;

/// Why a router does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// `fleet.decode` is empty.
    #[error("no workers configured: `fleet.decode` is empty (set it, or pass --decode URL)")]
    NoWorkers,
    /// The workers cannot be reached as the settings say.
    #[error("{0}")]
    Transport(String),
    /// The tokenizer or the template cannot be read.
    #[error("tokens cannot be counted: {0}")]
    Tokens(String),
    /// An actor could not be spawned.
    #[error("an actor could not be started: {0}")]
    Actor(String),
}

/// Starts routers.
#[derive(Debug)]
pub struct Router;

impl Router {
    /// Starts the actors on the current runtime and connects to the workers in the background.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start(settings: &Settings) -> Result<RouterHandle, StartError> {
        let connector = Connector::new(&settings.fleet).map_err(StartError::Transport)?;
        match settings.fleet.admission() {
            Admission::Node => Self::start_over(settings, Arc::new(HttpTransport::new(&connector))).await,
            Admission::Local => {
                let keepers = Keepers::new(keeper(settings), &connector);
                start(settings, Arc::new(keepers.clone()), Some(keepers)).await
            }
        }
    }

    /// As [`Router::start`], over another way to the workers.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start_over(
        settings: &Settings,
        transport: Arc<dyn Transport>,
    ) -> Result<RouterHandle, StartError> {
        start(settings, transport, None).await
    }
}

async fn start(
    settings: &Settings,
    transport: Arc<dyn Transport>,
    keepers: Option<Keepers>,
) -> Result<RouterHandle, StartError> {
    let workers = workers(settings);
    if !workers.iter().any(|w| w.role == Role::Decode) {
        return Err(StartError::NoWorkers);
    }
    let exact = exact(&settings.sessions).map_err(StartError::Tokens)?;
    let turns = TurnRouter::start(config(settings), workers, transport)
        .await
        .map_err(|e| StartError::Actor(e.to_string()))?;
    let live = Live::new(turns, settings.sessions.clone().into(), keepers, exact);
    let connector = Connector::new(&settings.fleet).map_err(StartError::Transport)?;
    let gateway = Gateway::new(settings, live.clone(), connector);
    Ok(RouterHandle { live, gateway })
}

fn keeper(settings: &Settings) -> keeper::Config {
    let fleet = &settings.fleet;
    keeper::Config {
        engine: fleet.engine(),
        options: settings.options.clone(),
        k_d: fleet.k_d,
        kv_events: fleet.kv_events(),
        exact: settings.sessions.tokens == Counting::Tokens,
    }
}

/// A running router. Clones share it.
#[derive(Clone)]
pub struct RouterHandle {
    live: Live,
    gateway: Gateway<Live>,
}

impl RouterHandle {
    /// Mounts the gateway in an actix-web app; call it in the app's factory. See [`Gateway::configure`] for
    /// what the app's server needs.
    pub fn configure(&self, app: &mut ServiceConfig) {
        self.gateway.configure(app);
    }

    /// Listens on `http.listen`. The returned server serves when it is awaited, or handed to [`Self::run`]; it takes
    /// no signals itself.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn serve(&self) -> Result<Serving, BindError> {
        server::start(self.gateway.clone())
    }

    /// Serves until `told` ends, then drains: `http.drain_delay_s` of accepting while `/ready` says 503, then
    /// `http.drain_s` for running turns. `again` cuts it short. The actors are stopped at the end.
    ///
    /// # Errors
    /// The server broke down.
    pub async fn run(
        &self,
        serving: Serving,
        told: impl Future<Output = ()>,
        again: impl Future<Output = ()>,
    ) -> std::io::Result<Report> {
        self.gateway.run(serving, told, again).await
    }

    /// How the gateway's requests ended so far.
    pub fn totals(&self) -> Totals {
        self.gateway.totals()
    }

    /// Where [`Self::reload`] and `POST /admin/reload` read the settings from.
    pub fn read_from(&self, source: Source) {
        self.gateway.read_from(source);
    }

    /// Reads the settings anew and takes over what changed: all of it, or nothing. Returns the keys that did.
    ///
    /// # Errors
    /// They are invalid, or a key changed that cannot while turns run.
    pub fn reload(&self) -> Result<Vec<String>, ApiError> {
        self.gateway.reload()
    }

    /// Places a turn; the caller executes it. See [`TurnRouter::route`].
    ///
    /// # Errors
    /// Why it is not served.
    pub async fn route(&self, turn: TurnRequest) -> Placed {
        self.turns().route(turn).await
    }

    /// The actors: observable state, draining.
    pub fn turns(&self) -> &TurnRouter {
        self.live.turns()
    }

    /// Turns `/ready` off, so that nothing new is sent here.
    pub fn drain(&self) {
        self.live.drain();
    }

    /// Stops the actors.
    pub async fn stop(&self) {
        self.turns().stop().await;
    }
}

fn config(settings: &Settings) -> Config {
    Config {
        options: Arc::new(settings.options.clone()),
        cost: Arc::new(CostModel {
            able: settings.fleet.engine().capabilities().able,
            ..CostModel::reference()
        }),
        admit_timeout: Duration::from_millis(settings.fleet.admit_timeout_ms),
        max_inflight: settings.http.max_inflight,
        max_session_turns: settings.sessions.max_turns,
        breaker: Limits {
            failures: settings.fleet.breaker_failures,
            open_ms: settings.fleet.breaker_open_ms,
        },
        passivate: Duration::from_secs(settings.sessions.passivate_s),
        session_ttl: Duration::from_secs(settings.sessions.ttl_h * 3600),
        max_sessions: settings.sessions.max_records,
        instance: rand::random(),
    }
}

fn exact(sessions: &Sessions) -> Result<Option<Exact>, String> {
    let path = |path: &str| Path::new(path).to_owned();
    let template = Some(&*sessions.chat_template).filter(|path| !path.is_empty()).map(path);
    match sessions.tokens {
        Counting::Bytes => Ok(None),
        Counting::Tokens => Exact::load(&path(&sessions.tokenizer), template.as_deref()).map(Some),
    }
}

fn workers(settings: &Settings) -> Vec<WorkerSpec> {
    let spec = |role, letter| {
        move |(i, url): (usize, &String)| WorkerSpec { name: format!("{letter}{i}"), url: url.clone(), role }
    };
    let fleet = &settings.fleet;
    let decode = fleet.decode.iter().enumerate().map(spec(Role::Decode, "d"));
    decode.chain(fleet.prefill.iter().enumerate().map(spec(Role::Prefill, "p"))).collect()
}
