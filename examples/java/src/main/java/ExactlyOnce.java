import com.google.protobuf.ByteString;
import epochkv.v1.GetOutcomeRequest;
import epochkv.v1.GetRequest;
import epochkv.v1.Increment;
import epochkv.v1.Invocation;
import epochkv.v1.InvokeRequest;
import epochkv.v1.InvokeResponse;
import epochkv.v1.KVServiceGrpc;
import epochkv.v1.OutcomeState;
import epochkv.v1.TransactionServiceGrpc;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.security.SecureRandom;
import java.util.EnumSet;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.TimeUnit;

/**
 * Counts to COUNT (1000) at ENDPOINT, and checks that each increment was executed exactly once, whatever happens to the server and to
 * its answers meanwhile. See docs/exactly-once.md; {@code make test-clients} kills the server under it. TLS_DIR is a directory that {@code kvctl tls init} has
 * made; without it the connection is plain text.
 */
public final class ExactlyOnce {
  private static final SecureRandom RANDOM = new SecureRandom();
  private static final int ATTEMPTS = 100;

  /** Statuses of attempts that may have been executed all the same. INTERNAL includes OUTCOME_UNKNOWN: the server's log failed. */
  private static final Set<Status.Code> LOST = EnumSet.of(Status.Code.UNAVAILABLE, Status.Code.DEADLINE_EXCEEDED,
      Status.Code.CANCELLED, Status.Code.INTERNAL, Status.Code.UNKNOWN);

  private final KVServiceGrpc.KVServiceBlockingStub kv;
  private final TransactionServiceGrpc.TransactionServiceBlockingStub transactions;

  private ExactlyOnce(ManagedChannel channel) {
    kv = KVServiceGrpc.newBlockingStub(channel);
    transactions = TransactionServiceGrpc.newBlockingStub(channel);
  }

  /** A UUID of version 7 (RFC 9562): 48 bits of milliseconds, and 74 random bits. */
  static ByteString uuid7() {
    byte[] b = new byte[16];
    RANDOM.nextBytes(b);
    byte[] now = ByteBuffer.allocate(8).putLong(System.currentTimeMillis()).array();
    System.arraycopy(now, 2, b, 0, 6);
    b[6] = (byte) (0x70 | b[6] & 0x0f);
    b[8] = (byte) (0x80 | b[8] & 0x3f);
    return ByteString.copyFrom(b);
  }

  /** Sends a request until its outcome is known. A StatusRuntimeException means that it was not executed. */
  InvokeResponse write(InvokeRequest.Builder builder) throws InterruptedException {
    InvokeRequest request = builder.setRequestId(uuid7()).build(); // once, before the first attempt
    boolean lost = false;
    for (int n = 0; n < ATTEMPTS; n++) {
      try {
        return kv.withDeadlineAfter(5, TimeUnit.SECONDS).invoke(request);
      } catch (StatusRuntimeException e) {
        if (!LOST.contains(e.getStatus().getCode()) && (!lost || !wasExecuted(request.getRequestId()))) {
          throw e;
        }
        lost = true;
        Thread.sleep(RANDOM.nextInt((int) Math.min(1000, 20 * Math.pow(2, n))));
      }
    }
    throw new IllegalStateException("whether the request was executed is not known: " + request.getRequestId());
  }

  /**
   * Decides what became of a lost attempt, after a later one was refused: the refusal says nothing of the lost one. With the fence, the
   * request is not executed after the answer.
   */
  private boolean wasExecuted(ByteString id) {
    OutcomeState state = transactions.withDeadlineAfter(5, TimeUnit.SECONDS)
        .getOutcome(GetOutcomeRequest.newBuilder().setRequestId(id).setFence(true).build()).getState();
    if (state == OutcomeState.OUTCOME_STATE_EXPIRED) {
      throw new IllegalStateException("the request is too old: read the data");
    }
    return state == OutcomeState.OUTCOME_STATE_APPLIED;
  }

  private boolean run(int count) throws InterruptedException {
    ByteString key = ByteString.copyFromUtf8("examples/java");
    Invocation increment = Invocation.newBuilder().setKey(key).setIncrement(Increment.newBuilder().setDelta(1)).setReturnNew(true).build();
    int again = 0;
    for (int i = 0; i < count; i++) {
      again += write(InvokeRequest.newBuilder().setInvocation(increment)).getDeduplicated() ? 1 : 0;
    }
    String value = kv.withDeadlineAfter(5, TimeUnit.SECONDS).get(GetRequest.newBuilder().setKey(key).build()).getValue().toStringUtf8();
    System.out.printf("java: %s of %d; %d were answered by an attempt after the one that was executed%n", value, count, again);
    return value.equals(Integer.toString(count));
  }

  /** How to connect: with the certificates of TLS_DIR, if there is one. */
  private static ChannelCredentials credentials() throws IOException {
    String dir = System.getenv("TLS_DIR");
    if (dir == null || dir.isEmpty()) {
      return InsecureChannelCredentials.create();
    }
    return TlsChannelCredentials.newBuilder().trustManager(new File(dir, "ca.crt"))
        .keyManager(new File(dir, "client.crt"), new File(dir, "client.key")).build();
  }

  public static void main(String[] args) throws InterruptedException, IOException {
    ManagedChannel channel = Grpc.newChannelBuilder(System.getenv("ENDPOINT"), credentials()).build();
    int count = Optional.ofNullable(System.getenv("COUNT")).map(Integer::parseInt).orElse(1000);
    boolean exact = new ExactlyOnce(channel).run(count);
    channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    if (!exact) {
      System.exit(1);
    }
  }
}
