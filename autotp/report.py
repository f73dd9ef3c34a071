def render_graph(g):
    return str(g)
