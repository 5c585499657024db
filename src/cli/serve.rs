//! `kvc-router serve`.

use clap::Args;

use super::{Exit, SettingsArgs, Signals, bad_input, failure};
use crate::http::server::BindError;
use crate::router::{Router, StartError};

/// Gateway in front of running workers.
#[derive(Debug, Args)]
pub struct Serve {
    #[command(flatten)]
    settings: SettingsArgs,
}

impl Serve {
    pub(super) fn run(self) -> Exit {
        let settings = match self.settings.load() {
            Ok(loaded) => loaded.settings,
            Err(problem) => return bad_input(problem),
        };
        crate::telemetry::install_logs(crate::telemetry::SERVICE_LOGS);
        actix_web::rt::System::new().block_on(async move {
            let router = match Router::start(&settings).await {
                Ok(router) => router,
                Err(problem @ (StartError::NoWorkers | StartError::Transport(_))) => {
                    return bad_input(problem);
                }
                Err(problem) => return failure(problem),
            };
            let serving = match router.serve() {
                Ok(serving) => serving,
                Err(problem @ (BindError::Access(_) | BindError::Tls(_))) => return bad_input(problem),
                Err(problem) => return failure(problem),
            };
            let scheme = if settings.http.tls_cert.is_empty() { "http" } else { "https" };
            for addr in &serving.addrs {
                eprintln!("kvc-router serves on {scheme}://{addr}");
            }
            if let Some(admin) = serving.admin {
                eprintln!("administration and metrics on http://{admin}");
            }
            router.read_from(Box::new(move || self.settings.load().map(|loaded| loaded.settings)));
            let (mut first, mut second) = match (Signals::take(), Signals::take()) {
                (Ok(first), Ok(second)) => (first, second),
                (Err(problem), _) | (_, Err(problem)) => return failure(problem),
            };
            let reload = || match router.reload() {
                Ok(changed) => eprintln!("reloaded: {} keys changed {changed:?}", changed.len()),
                Err(problem) => eprintln!("error: not reloaded: {}", problem.message),
            };
            let told = first.stop(reload);
            // The second signal counts from the first one on.
            let again = async {
                second.stop(|| {}).await;
                second.stop(|| {}).await;
            };
            match router.run(serving, told, again).await {
                Ok(report) => {
                    eprintln!("{report}");
                    Exit::Ok
                }
                Err(problem) => failure(problem),
            }
        })
    }
}
