//! Counts to COUNT (1000) at ENDPOINT, and checks that each increment was executed exactly once, whatever happens to the server and
//! to its answers meanwhile. See docs/exactly-once.md; `make test-clients` kills the server under it. TLS_DIR is a directory that
//! kvctl tls init has made; without it the connection is plain text.

use std::{env, error::Error, fs, time::Duration};

use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};
use uuid::Uuid;

/// The messages and clients that build.rs generates.
#[allow(dead_code)]
mod epochkv {
    pub mod v1 {
        tonic::include_proto!("epochkv.v1");
    }
}
mod google {
    pub mod rpc {
        tonic::include_proto!("google.rpc");
    }
}

use epochkv::v1::{
    invocation::Operation, kv_service_client::KvServiceClient, transaction_service_client::TransactionServiceClient, GetOutcomeRequest,
    GetRequest, Increment, Invocation, InvokeRequest, InvokeResponse, OutcomeState,
};

const ATTEMPTS: u32 = 100;
const DEADLINE: Duration = Duration::from_secs(5);

struct Client {
    kv: KvServiceClient<Channel>,
    transactions: TransactionServiceClient<Channel>,
}

/// A request with a deadline, which the server is told.
fn within_deadline<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(DEADLINE);
    request
}

/// Whether an attempt that ended so may have been executed all the same. INTERNAL includes OUTCOME_UNKNOWN: the log of the server
/// failed.
fn is_lost(error: &Status) -> bool {
    matches!(error.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Internal | Code::Unknown)
}

impl Client {
    fn new(channel: Channel) -> Self {
        Client { kv: KvServiceClient::new(channel.clone()), transactions: TransactionServiceClient::new(channel) }
    }

    /// Sends a request until its outcome is known. An error means that it was not executed, unless the error says otherwise. The
    /// answer is none if it was executed by an attempt whose answer was lost.
    async fn invoke(&mut self, mut message: InvokeRequest) -> Result<Option<InvokeResponse>, Box<dyn Error>> {
        message.request_id = Uuid::now_v7().as_bytes().to_vec(); // once, before the first attempt
        let mut lost = false;
        for attempt in 0..ATTEMPTS {
            match self.kv.invoke(within_deadline(message.clone())).await {
                Ok(response) => return Ok(Some(response.into_inner())),
                Err(error) if is_lost(&error) => lost = true,
                Err(_) if lost && self.was_executed(&message.request_id).await? => return Ok(None),
                Err(error) => return Err(error.into()),
            }
            let most = 1000.min(20u64 << attempt.min(10));
            tokio::time::sleep(Duration::from_millis(rand::random_range(0..most))).await;
        }
        Err(format!("whether the request {:02x?} was executed is not known", message.request_id).into())
    }

    /// Decides what became of a lost attempt, after a later one was refused: the refusal says nothing of the lost one. With the
    /// fence, the request is not executed after the answer.
    async fn was_executed(&mut self, id: &[u8]) -> Result<bool, Box<dyn Error>> {
        let message = GetOutcomeRequest { request_id: id.to_vec(), fence: true };
        let outcome = self.transactions.get_outcome(within_deadline(message)).await?.into_inner();
        match outcome.state() {
            OutcomeState::Expired => Err("the request is too old: read the data".into()),
            state => Ok(state == OutcomeState::Applied),
        }
    }
}

fn connect() -> Result<Channel, Box<dyn Error>> {
    let address = env::var("ENDPOINT")?;
    let Ok(dir) = env::var("TLS_DIR") else {
        return Ok(Endpoint::from_shared(format!("http://{address}"))?.connect_lazy());
    };
    let read = |name: &str| fs::read(format!("{dir}/{name}"));
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(read("ca.crt")?))
        .identity(Identity::from_pem(read("client.crt")?, read("client.key")?));
    Ok(Endpoint::from_shared(format!("https://{address}"))?.tls_config(tls)?.connect_lazy())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let count: i64 = env::var("COUNT").map_or(Ok(1000), |n| n.parse())?;
    let key = b"examples/rust".to_vec();
    let invocation = Invocation {
        key: key.clone(),
        operation: Some(Operation::Increment(Increment { delta: 1, ..Default::default() })),
        return_new: true,
        ..Default::default()
    };
    let request = InvokeRequest { invocation: Some(invocation), ..Default::default() };
    let mut client = Client::new(connect()?);
    let mut again = 0;
    for _ in 0..count {
        if client.invoke(request.clone()).await?.is_none_or(|response| response.deduplicated) {
            again += 1;
        }
    }
    let got = client.kv.get(within_deadline(GetRequest { key, ..Default::default() })).await?.into_inner();
    let value = String::from_utf8(got.value)?;
    println!("rust: {value} of {count}; {again} were answered by an attempt after the one that was executed");
    if value.parse() != Ok(count) {
        return Err("the count is wrong".into());
    }
    Ok(())
}
