package server

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/transport"
)

// registered are the full names of all methods that a server serves.
func registered(t *testing.T, kind config.Transport) (names []string) {
	t.Helper()
	s := new(Server)
	s.config = testConfig()
	s.gate.init()
	var to interface {
		grpc.ServiceRegistrar
		GetServiceInfo() map[string]grpc.ServiceInfo
	} = new(transport.Services)
	if kind == config.TransportGRPC {
		to = grpc.NewServer(grpc.ForceServerCodecV2(pb.NewCodec()))
	}
	s.register(to)
	for service, info := range to.GetServiceInfo() {
		for _, m := range info.Methods {
			names = append(names, "/"+service+"/"+m.Name)
		}
	}
	slices.Sort(names)
	return names
}

func TestEveryMethodHasARowOfRights(t *testing.T) {
	for _, kind := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		names := registered(t, kind)
		if len(names) < 40 {
			t.Fatalf("%s: %d methods", kind, len(names))
		}
		for _, name := range names {
			if rpcRows[name] == nil {
				t.Errorf("%s: %s has no row in rpcTable, and is refused", kind, name)
			}
		}
		if rows := slices.Sorted(maps.Keys(rpcRows)); !slices.Equal(rows, names) {
			t.Errorf("%s: rows %v, methods %v", kind, rows, names)
		}
	}
	seen := map[string]bool{}
	for i := range rpcTable {
		row := &rpcTable[i]
		if seen[row.method] {
			t.Errorf("%s has two rows", row.method)
		}
		seen[row.method] = true
		checks := row.actions != 0 || row.footprint != nil
		switch {
		case row.open && (checks || row.itself):
			t.Errorf("%s is open, and has rights", row.method)
		case !row.open && !checks && row.method != pb.TransactionService_GetOutcome_FullMethodName:
			t.Errorf("%s needs nothing", row.method)
		case !row.open && strings.HasPrefix(row.method, "/grpc."):
			t.Errorf("%s is not ours", row.method)
		}
	}
}
