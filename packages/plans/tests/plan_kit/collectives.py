"""An encoder on the ranks of a language model: its plan with collectives, and an order of it that cannot end."""

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.generators import multi_module_1f1b

GRAPH = ModuleGraph({"enc": 1, "llm": 2}, {"enc": ["llm"]})
COLOCATED = multi_module_1f1b(GRAPH, 4, placement=[(0, 1), 0, 1])
BRIDGE = Edge(0, 1)


# Each position's computes in an order as if they needed no other rank: the gather of 0B0's gradient before 0F2 on
# position 0, after it on position 1, though both positions do 0F2 together.
APART = """
microbatches 4
modules enc:1 llm:2
edges enc>llm
placement 0,1 0 1
group bridge 0,1 edges 0>1
0: 0F0 0COLLECTIVE0>1@bridge 1F0 1SEND_F0>2 0F1 0COLLECTIVE1>1@bridge 1F1 [1SEND_F1>2 1RECV_B0<2] 1B0 \
1COLLECTIVE0>0@bridge 0F2 0COLLECTIVE2>1@bridge 0B0 1F2 [1RECV_B1<2 1SEND_F2>2] 1B1 1COLLECTIVE1>0@bridge 0F3 \
0COLLECTIVE3>1@bridge 0B1 1F3 [1RECV_B2<2 1SEND_F3>2] 1B2 1COLLECTIVE2>0@bridge 0B2 1RECV_B3<2 1B3 \
1COLLECTIVE3>0@bridge 0B3
1: 0F0 0COLLECTIVE0>1@bridge 0F1 2RECV_F0<1 0COLLECTIVE1>1@bridge 2F0 2B0 [2RECV_F1<1 2SEND_B0>1] 0F2 2F1 \
1COLLECTIVE0>0@bridge 0COLLECTIVE2>1@bridge 0B0 2B1 [2SEND_B1>1 2RECV_F2<1] 0F3 2F2 1COLLECTIVE1>0@bridge \
0COLLECTIVE3>1@bridge 0B1 2B2 [2SEND_B2>1 2RECV_F3<1] 2F3 1COLLECTIVE2>0@bridge 0B2 2B3 2SEND_B3>1 \
1COLLECTIVE3>0@bridge 0B3
""".replace("\\\n", "")
