//! TLS, in and out: rustls with ring. One set of authorities for all workers: the system's, or those of a file.

use std::path::Path;
use std::sync::Arc;

use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// What a listener shows; `None` without files.
///
/// # Errors
/// Names the setting and the file.
pub fn server(cert: &str, key: &str) -> Result<Option<Arc<ServerConfig>>, String> {
    if cert.is_empty() {
        return Ok(None);
    }
    let chain = certificates("http.tls_cert", cert)?;
    let bad = |error: &dyn std::fmt::Display| format!("`http.tls_key = {key:?}`: {error}");
    let private = PrivateKeyDer::from_pem_file(Path::new(key)).map_err(|e| bad(&e))?;
    let config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|e| bad(&e))?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(|e| bad(&e))?;
    let mut config = config;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Some(Arc::new(config)))
}

/// Whom the gateway believes; `ca_file` empty: the authorities of the system.
///
/// # Errors
/// Names the setting and the file.
pub fn client(ca_file: &str) -> Result<Arc<ClientConfig>, String> {
    let mut roots = RootCertStore::empty();
    if ca_file.is_empty() {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    } else {
        for authority in certificates("fleet.ca_file", ca_file)? {
            roots.add(authority).map_err(|e| format!("`fleet.ca_file = {ca_file:?}`: {e}"))?;
        }
    }
    let config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|e| format!("TLS: {e}"))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}

fn certificates(setting: &str, file: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let bad = |error: &dyn std::fmt::Display| format!("`{setting} = {file:?}`: {error}");
    let found = CertificateDer::pem_file_iter(Path::new(file)).map_err(|e| bad(&e))?;
    let found = found.collect::<Result<Vec<_>, _>>().map_err(|e| bad(&e))?;
    if found.is_empty() { Err(bad(&"it holds no certificate")) } else { Ok(found) }
}
