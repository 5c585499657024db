//! `kvc-router serve`.

use clap::Args;

use super::{Exit, SettingsArgs, bad_input, failure};
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
                Err(problem @ StartError::NoWorkers) => return bad_input(problem),
                Err(problem) => return failure(problem),
            };
            let serving = match router.serve() {
                Ok(serving) => serving,
                Err(problem) => return failure(problem),
            };
            for addr in &serving.addrs {
                eprintln!("kvc-router serves on http://{addr}");
            }
            let ended = serving.server.await;
            router.stop().await;
            ended.map_or_else(failure, |()| Exit::Ok)
        })
    }
}
