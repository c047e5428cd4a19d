//! Certificates of a test's own.

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};

use super::{TemporaryFile, temporary_file};

/// Who issues certificates.
#[derive(Debug)]
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: TemporaryFile,
}

/// A certificate and its key.
#[derive(Debug)]
pub struct Identity {
    pub certificate: TemporaryFile,
    pub key: TemporaryFile,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let mut params = params(&[], name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let certificate = temporary_file(&params.self_signed(&key).expect("a certificate").pem());
        Self { issuer: Issuer::new(params, key), certificate }
    }

    /// The path of its own certificate.
    pub fn path(&self) -> &str {
        self.certificate.path()
    }

    /// Issues a certificate for these hosts.
    pub fn issue(&self, hosts: &[&str]) -> Identity {
        self.sign(&params(hosts, "stock"))
    }

    /// Issues a certificate that has expired.
    pub fn issue_expired(&self, hosts: &[&str]) -> Identity {
        let mut params = params(hosts, "stock");
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(2021, 1, 1);
        self.sign(&params)
    }

    fn sign(&self, params: &CertificateParams) -> Identity {
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        Identity { certificate: temporary_file(&certificate.pem()), key: temporary_file(&key.serialize_pem()) }
    }
}

fn params(hosts: &[&str], name: &str) -> CertificateParams {
    let hosts: Vec<_> = hosts.iter().map(|host| (*host).to_owned()).collect();
    let mut params = CertificateParams::new(hosts).expect("names");
    params.distinguished_name.push(DnType::CommonName, name);
    params
}
