package server

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/keys"
)

// isDrained reports whether no call of the console begins any more.
func (c *consoleCalls) isDrained() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended
}

// callThatWaitsForALatch has the console release a lock whose latch another session holds until release is called, and returns when the call is executed.
func (h *harness) callThatWaitsForALatch(t *testing.T) (release func(), answered <-chan int) {
	t.Helper()
	lease, err := pb.NewLeaseServiceClient(h.conn).GrantLease(testContext(t), &pb.GrantLeaseRequest{Ttl: durationpb.New(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	held, err := pb.NewLockServiceClient(h.conn).AcquireLock(testContext(t), &pb.AcquireLockRequest{Name: []byte("lock"), LeaseId: lease.Id})
	if err != nil || !held.Acquired {
		t.Fatal(held, err)
	}
	release = h.holdLatchOf(t, keys.Append(nil, keys.SpaceSystem, append([]byte{keys.SystemLock}, "lock"...)))
	code := make(chan int, 1)
	go func() {
		code <- tryConsoleCall(testContext(t), h, "LockService/ReleaseLock", fmt.Sprintf(`{"name":"bG9jaw==","token":"%d"}`, held.Token))
	}()
	eventually(t, "the call is executed", func() bool { open, _ := h.store.Sessions(); return open == 2 })
	return release, code
}

// TestTheStoreOutlivesCallsOfTheConsole: the server stops while a call of the console is executed, which is no request of a transport.
// The store is closed when the call has been answered, and later calls are refused.
func TestTheStoreOutlivesCallsOfTheConsole(t *testing.T) {
	for _, transport := range bothTransports {
		t.Run(string(transport), func(t *testing.T) {
			h := mustStart(t, onTransport(transport), func(c *config.Config) {
				c.Console, c.DrainTimeout, c.CloseTimeout = config.ConsoleFull, patience, patience
			})
			release, answered := h.callThatWaitsForALatch(t)
			stopped := make(chan error, 1)
			go func() { stopped <- h.stop() }()
			eventually(t, "the server waits for the call", func() bool { return h.drain.console.isDrained() || h.store.Closed() })
			if code := tryConsoleCall(testContext(t), h, "AdminService/Status", `{}`); code != http.StatusServiceUnavailable {
				t.Errorf("a later call is answered with %d", code)
			}
			select {
			case err := <-stopped:
				t.Fatalf("the server has stopped (%v) while the call was executed", err)
			case <-time.After(100 * time.Millisecond):
			}
			release()
			if code := <-answered; code != http.StatusOK {
				t.Errorf("the call is answered with %d", code)
			}
			if err := <-stopped; err != nil {
				t.Error(err)
			}
		})
	}
}

// TestCallsOfTheConsoleAreCutOff with the requests that are left when the drain timeout has passed.
func TestCallsOfTheConsoleAreCutOff(t *testing.T) {
	var c consoleCalls
	c.init()
	call, done, ok := c.begin(t.Context())
	if !ok {
		t.Fatal("refused")
	}
	drain, stop := context.WithCancel(t.Context())
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		c.drain(drain)
	}()
	eventually(t, "it drains", c.isDrained)
	if call.Err() != nil {
		t.Error("the call is cut off before its time")
	}
	stop()
	<-call.Done()
	if err := context.Cause(call); !errors.Is(err, errShuttingDown) {
		t.Error(err)
	}
	select {
	case <-drained:
		t.Error("nothing waits for a call that was cut off")
	default:
	}
	done()
	<-drained
	if _, _, ok := c.begin(t.Context()); ok {
		t.Error("a call begins after the drain")
	}
}

// tryConsoleCall calls a method through the console, and returns the code of HTTP; 0 if there is no answer.
func tryConsoleCall(ctx context.Context, h *harness, method, message string) int {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+h.HTTPAddress()+"/console/api/call/epochkv.v1."+method, strings.NewReader(message))
	if err != nil {
		return 0
	}
	r.Header.Set("X-Epochkv-Console", "1")
	answer, err := http.DefaultClient.Do(h.authorize(r))
	if err != nil {
		return 0
	}
	_ = answer.Body.Close()
	return answer.StatusCode
}
