package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
)

// redisProxy forwards connections to a Redis. After cut, connections end, and new ones go to the next Redis, or are closed at once.
type redisProxy struct {
	address string

	mu     sync.Mutex
	target string // empty: connections are closed at once
	open   []net.Conn
}

func startRedisProxy(t *testing.T, target string) *redisProxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &redisProxy{address: "redis://" + listener.Addr().String() + "/0", target: target}
	go func() {
		for {
			accepted, err := listener.Accept()
			if err != nil {
				return
			}
			p.forward(accepted)
		}
	}()
	t.Cleanup(func() {
		_ = listener.Close()
		p.cut("")
	})
	return p
}

func (p *redisProxy) forward(accepted net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.target == "" {
		_ = accepted.Close()
		return
	}
	onward, err := net.Dial("tcp", p.target)
	if err != nil {
		_ = accepted.Close()
		return
	}
	p.open = append(p.open, accepted, onward)
	for _, pair := range [][2]net.Conn{{accepted, onward}, {onward, accepted}} {
		go func() {
			_, _ = io.Copy(pair[0], pair[1])
			_ = pair[0].Close()
		}()
	}
}

// cut ends all connections.
func (p *redisProxy) cut(next string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = next
	for _, c := range p.open {
		_ = c.Close()
	}
	p.open = nil
}

// redisRunning is a Redis with a few keys. It calls reading before each GET.
func redisRunning(t *testing.T, id string, reading func()) (address string) {
	t.Helper()
	m := miniredis.RunT(t)
	for i := range 3 {
		_ = m.Set(fmt.Sprintf("key/%d", i), "v")
	}
	m.Server().SetPreHook(func(peer *server.Peer, cmd string, _ ...string) bool {
		switch {
		case cmd == "GET":
			reading()
		case cmd == "INFO" && id != "":
			peer.WriteBulk("# Server\r\nredis_version:8.0.0\r\nrun_id:" + id + "\r\n")
			return true
		}
		return false
	})
	return m.Addr()
}

// TestALostRedisIsNotTheEndOfItsKeys: the records end with an error when connections are closed at once, as a proxy does whose Redis is down,
// and when the next connection reaches another run of the Redis, of which the cursors differ.
func TestALostRedisIsNotTheEndOfItsKeys(t *testing.T) {
	for _, c := range []struct {
		name, id, next string // of the Redis that follows
		closed         bool
		says           string // empty: the import goes on
	}{
		{"closed", "a", "", true, "has closed the connection"},
		{"another run", "a", "b", false, "was restarted"},
		{"the same run", "a", "a", false, ""},
		{"runs without a name", "", "", false, "does not tell"},
	} {
		t.Run(c.name, func(t *testing.T) {
			next := ""
			if !c.closed {
				next = redisRunning(t, c.next, func() {})
			}
			var proxy *redisProxy
			proxy = startRedisProxy(t, redisRunning(t, c.id, func() { proxy.cut(next) }))
			source, _, err := openRedis(t.Context(), proxy.address, false, io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			defer source.close()
			keys := 0
			for err == nil {
				if _, _, err = source.next(); err == nil {
					keys++
				}
			}
			if ended := errors.Is(err, io.EOF); c.says == "" && (!ended || keys != 3) || c.says != "" && (ended || !strings.Contains(err.Error(), c.says)) {
				t.Errorf("%d keys, then %v; want an error with %q", keys, err, c.says)
			}
		})
	}
}
