package clients

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/epochkv/epochkv/client"
)

var nginxFlag = flag.String("nginx", "", "the program nginx, through which clients reach the server (make test-proxy)")

// nginxConfig is what a proxy of gRPC needs: bodies and answers without a limit of bytes, and streams that may be silent.
const nginxConfig = `
daemon off;
master_process off;
pid nginx.pid;
error_log stderr warn;
events { worker_connections 4096; }
http {
	access_log off;
	client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
	keepalive_requests 1000000;
	upstream epochkv { server %s; keepalive 64; keepalive_requests 1000000; }
	server {
		listen %s http2;
		http2_max_concurrent_streams 1000;
		client_max_body_size 0;
		client_body_timeout 1h;
		grpc_read_timeout 1h;
		grpc_send_timeout 1h;
		location / { grpc_pass grpc://epochkv; }
	}
}
`

// startNginx runs nginx before a server until the test ends, and returns its address. Without the program the test is left out: CI does
// not install it, and make test-proxy fails without it.
func startNginx(t *testing.T, s *server) (endpoint string) {
	t.Helper()
	if *nginxFlag == "" {
		t.Skip("needs nginx: see make test-proxy")
	}
	dir := t.TempDir()
	endpoint = freeAddress(t)
	file := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(file, fmt.Appendf(nil, nginxConfig, s.endpoint, endpoint), 0o600); err != nil {
		t.Fatal(err)
	}
	process := exec.Command(*nginxFlag, "-p", dir, "-c", file, "-e", "stderr")
	var log bytes.Buffer
	process.Stdout, process.Stderr = &log, &log
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = process.Process.Kill()
		_ = process.Wait()
		if t.Failed() {
			t.Logf("the log of nginx:\n%s", log.String())
		}
	})
	for deadline := time.Now().Add(startMax); ; time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("tcp", endpoint)
		if err == nil {
			_ = conn.Close()
			return endpoint
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// onBothTransports runs a test through nginx with a server of each transport.
func onBothTransports(t *testing.T, test func(t *testing.T, s *server, c *client.Client, proxied string)) {
	for _, transport := range []string{"direct", "grpc-go"} {
		t.Run(transport, func(t *testing.T) {
			s := startServer(t, "--transport", transport)
			proxied := startNginx(t, s)
			test(t, s, s.dial(proxied), proxied)
		})
	}
}

// TestRequestsThroughNginx: requests of each shape, large values, and errors with their reasons.
func TestRequestsThroughNginx(t *testing.T) {
	onBothTransports(t, func(t *testing.T, s *server, c *client.Client, proxied string) {
		ctx := t.Context()
		large := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
		if _, err := c.Put(ctx, []byte("large"), large); err != nil {
			t.Fatal(err)
		}
		if v, err := c.Get(ctx, []byte("large")); err != nil || !bytes.Equal(v.Data, large) {
			t.Errorf("a large value: %d bytes, %v", len(v.Data), err)
		}
		_, err := c.Put(ctx, bytes.Repeat([]byte("k"), 1<<16), nil)
		if e := new(client.Error); !errors.As(err, &e) || e.Code != codes.InvalidArgument || e.Reason == 0 {
			t.Errorf("a long key: %v", err)
		}
		const count = 20_000
		fill(t, c, count)
		n := 0
		for e, err := range c.Scan(ctx, client.Range{Start: []byte("key-"), End: []byte("key.")}, client.ScanOptions{PageBytes: 32 << 10}) {
			if err != nil {
				t.Fatalf("after %d entries: %v", n, err)
			}
			if want := fmt.Sprintf("key-%06d", n); string(e.Key) != want {
				t.Fatalf("entry %d is %q, want %q", n, e.Key, want)
			}
			if n++; n%2_000 == 0 {
				time.Sleep(10 * time.Millisecond) // so that windows close
			}
		}
		if n != count {
			t.Errorf("%d of %d entries", n, count)
		}
		mustCount(t, c, 4, 25)
		direct := s.endpoint
		s.endpoint = proxied
		for _, test := range []struct {
			args string
			code int
		}{{"health", 0}, {"put k v", 0}, {"get k", 0}, {"get missing", 3}, {"put --if-absent k v", 4}, {"scan --count", 0}, {"incr n", 0}, {"status", 0}} {
			if stdout, stderr, code := s.kvctl("", strings.Fields(test.args)...); code != test.code {
				t.Errorf("kvctl %s: exit %d, want %d\n%s%s", test.args, code, test.code, stdout, stderr)
			}
		}
		s.endpoint = direct
	})
}

// mustCount adds to one key in transactions of several goroutines, and checks the sum.
func mustCount(t *testing.T, c *client.Client, goroutines, rounds int) {
	t.Helper()
	key := []byte("counter")
	var all sync.WaitGroup
	for range goroutines {
		all.Go(func() {
			for range rounds {
				if err := c.Update(t.Context(), func(tx *client.Txn) error {
					v, err := tx.Get(key)
					if err != nil {
						return err
					}
					return tx.Put(key, []byte(strconv.Itoa(number(v)+1)))
				}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	if v, err := c.Get(t.Context(), key); err != nil || number(v) != goroutines*rounds {
		t.Errorf("the counter is %s, want %d: %v", v.Data, goroutines*rounds, err)
	}
}

// TestDeadlinesAndCancelsReachTheServerThroughNginx: a watch whose client goes away, or whose deadline passes, ends at the server.
func TestDeadlinesAndCancelsReachTheServerThroughNginx(t *testing.T) {
	onBothTransports(t, func(t *testing.T, s *server, c *client.Client, _ string) {
		for what, end := range map[string]func(context.Context) (context.Context, context.CancelFunc){
			"deadline": func(ctx context.Context) (context.Context, context.CancelFunc) {
				return context.WithTimeout(ctx, 500*time.Millisecond)
			},
			"cancel": context.WithCancel,
		} {
			ctx, cancel := end(t.Context())
			var seen atomic.Int64
			ended := make(chan error, 1)
			go func() {
				for _, err := range c.Watch(ctx, []client.Range{{}}, client.WatchOptions{}) {
					if err != nil {
						ended <- err
						return
					}
					seen.Add(1)
				}
				ended <- nil
			}()
			for i := 0; seen.Load() == 0 && ctx.Err() == nil; i++ {
				if _, err := c.Put(t.Context(), []byte(what), []byte(strconv.Itoa(i))); err != nil {
					t.Fatal(err)
				}
				time.Sleep(5 * time.Millisecond)
			}
			if what == "cancel" {
				cancel()
			}
			if err := <-ended; what == "deadline" && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: the watch ended with %v", what, err)
			}
			cancel()
			for deadline := time.Now().Add(startMax); ; time.Sleep(20 * time.Millisecond) {
				out, stderr, code := s.kvctl("", "feed", "list", "-o", "json")
				if code == 0 && !strings.Contains(out, "\"peer\"") {
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("%s: the server still has the watch: exit %d %s%s", what, code, out, stderr)
				}
			}
		}
	})
}

// TestRestartsThroughNginx: the server drains, or is killed, and starts again, while clients write, run transactions and watch through
// nginx. What was acknowledged is there, transactions took effect once, and the watch misses nothing.
func TestRestartsThroughNginx(t *testing.T) {
	onBothTransports(t, func(t *testing.T, s *server, c *client.Client, _ string) {
		const writers = 4
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var all sync.WaitGroup
		var acknowledged [writers]atomic.Int64
		for w := range writers {
			all.Go(func() {
				for i := int64(1); ctx.Err() == nil; i++ {
					for ctx.Err() == nil {
						if _, err := c.Put(ctx, fmt.Appendf(nil, "w/%d", w), fmt.Append(nil, i)); err == nil {
							acknowledged[w].Store(i)
							break
						}
						time.Sleep(10 * time.Millisecond)
					}
				}
			})
		}
		var watched [writers]atomic.Int64
		watchCtx, stopWatch := context.WithCancel(t.Context())
		defer stopWatch()
		var watches sync.WaitGroup
		watches.Go(func() {
			for u, err := range c.Watch(watchCtx, []client.Range{{Start: []byte("w/"), End: []byte("w0")}}, client.WatchOptions{}) {
				if err != nil {
					if watchCtx.Err() == nil {
						t.Errorf("the watch ended: %v", err)
					}
					return
				}
				if len(u.Difference) > 0 || len(u.Snapshot) > 0 {
					t.Error("the watch began again, although the log has everything")
				}
				for _, commit := range u.Commits {
					for _, e := range commit.Events {
						w, _ := strconv.Atoi(strings.TrimPrefix(string(e.Key), "w/"))
						i, _ := strconv.ParseInt(string(e.Value), 10, 64)
						if last := watched[w].Load(); last != 0 && i != last+1 && i != last { // a put may have been sent twice
							t.Errorf("writer %d: the watch jumps from %d to %d", w, last, i)
						}
						watched[w].Store(i)
					}
				}
			}
		})
		progress := func(when string) {
			t.Helper()
			for w := range writers {
				from := acknowledged[w].Load()
				for deadline := time.Now().Add(startMax); acknowledged[w].Load() < from+20; time.Sleep(5 * time.Millisecond) {
					if time.Now().After(deadline) {
						t.Fatalf("%s: writer %d does not go on", when, w)
					}
				}
			}
		}
		progress("at the beginning")
		for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL, syscall.SIGTERM, syscall.SIGKILL} {
			if code := s.signal(signal); signal == syscall.SIGTERM && code != 0 {
				t.Errorf("the drained server ended with %d", code)
			}
			s.start()
			progress("after " + signal.String())
		}
		cancel()
		all.Wait()
		for w := range writers {
			v, err := s.dial(s.endpoint).Get(t.Context(), fmt.Appendf(nil, "w/%d", w))
			if n := int64(number(v)); err != nil || n < acknowledged[w].Load() || n > acknowledged[w].Load()+1 {
				t.Errorf("writer %d: %s is there, %d was acknowledged: %v", w, v.Data, acknowledged[w].Load(), err)
			}
			for deadline := time.Now().Add(startMax); watched[w].Load() < acknowledged[w].Load(); time.Sleep(5 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("writer %d: the watch has come to %d of %d", w, watched[w].Load(), acknowledged[w].Load())
				}
			}
		}
		stopWatch()
		watches.Wait()
	})
}
