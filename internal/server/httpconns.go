package server

import (
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"

	"github.com/epochkv/epochkv/internal/transport"
)

// httpConnectionsMax bounds the connections of the HTTP listener: those of a few collectors of metrics, probes and browsers. Neither
// --max-connections nor the bound of memory counts them, and without a bound their descriptors would be missing for log segments.
const httpConnectionsMax = 64

// httpConns are the open connections of the HTTP server. Beyond the bound one is closed, see closeOneLocked:
// clients that keep connections open, or requests, must not keep probes out.
type httpConns struct {
	mu   sync.Mutex   // a leaf; guards what follows
	open []httpClient // in the order in which they began to wait, or were accepted
}

type httpClient struct {
	conn   net.Conn
	from   netip.Prefix
	active bool // a request is executed
}

// changed is told of each change of a connection; see http.Server.ConnState.
func (h *httpConns) changed(conn net.Conn, state http.ConnState) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.open {
		if h.open[i].conn == conn {
			h.open = append(h.open[:i], h.open[i+1:]...)
			break
		}
	}
	if state == http.StateClosed || state == http.StateHijacked {
		return
	}
	h.open = append(h.open, httpClient{conn: conn, from: transport.NetworkOf(conn.RemoteAddr()), active: state == http.StateActive})
	if state == http.StateNew && len(h.open) > httpConnectionsMax {
		h.closeOneLocked()
	}
}

// closeOneLocked closes a connection of the network that has most of them, so that one that opens very many takes no probe of another with it.
// It closes the one that has waited longest. If none of that network waits but the newest, it is that of the request that is executed for the longest
// time: one of many, whose clients may send or take a byte in ten seconds, and the newest may be a probe.
func (h *httpConns) closeOneLocked() {
	of := make(map[netip.Prefix]int)
	for _, c := range h.open {
		of[c.from]++
	}
	before, i := h.open[:len(h.open)-1], 0
	for k, c := range before[1:] {
		worst := before[i]
		if n := of[c.from] - of[worst.from]; n > 0 || n == 0 && worst.active && !c.active {
			i = k + 1
		}
	}
	conn := h.open[i].conn
	h.open = slices.Delete(h.open, i, i+1)
	closeNow(conn)
}

// closeNow closes a connection without the last alert of TLS, which a client that takes nothing would hold up.
func closeNow(conn net.Conn) {
	if secured, ok := conn.(*tls.Conn); ok {
		conn = secured.NetConn()
	}
	_ = conn.Close() // nothing is written any more
}
